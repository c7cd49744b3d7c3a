"""Engines start, stop and watch the processes of a job's roles: on this machine, by ssh, on Ray, Slurm, Kubernetes."""
