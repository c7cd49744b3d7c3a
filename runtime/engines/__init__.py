"""Where the processes of a job's roles run: this machine, Ray, Slurm, Kubernetes. An engine is one file."""
