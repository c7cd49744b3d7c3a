"""The coordinator: waits for the job's end, and gives out tasks in a job with dispatch="coordinator"."""
