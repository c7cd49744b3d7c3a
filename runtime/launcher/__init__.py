"""A job's roles on one machine: started, watched, started again."""
