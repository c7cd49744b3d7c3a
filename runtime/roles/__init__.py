"""The processes of a job: pservers, trainers, coordinators. Each runs the blocks of its program."""
