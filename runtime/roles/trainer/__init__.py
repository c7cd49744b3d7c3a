"""Trainers: they compute gradients."""
