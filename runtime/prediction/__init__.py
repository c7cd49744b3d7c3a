"""Predicting with what a job has trained, in this process."""
