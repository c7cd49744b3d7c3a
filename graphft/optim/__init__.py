"""Optimizers as values, what `minimize` makes of them, and torch's own read as these."""
