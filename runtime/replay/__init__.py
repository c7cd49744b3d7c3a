"""A batch of a job computed again, in one process: see `command`."""
