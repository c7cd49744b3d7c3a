"""Checkpoints: files, which of them counts, and the thread that writes them."""
