"""Weights and optimizer state from and for others: plain files, Hugging Face's folders, torch's own checkpoints."""
