"""Validating the model of a checkpoint, range by range, while it is trained."""
