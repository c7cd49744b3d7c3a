"""Predicting with what a job has trained: workers of this machine share the data, and none of them is needed."""
