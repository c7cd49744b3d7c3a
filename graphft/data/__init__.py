"""Describes what a job trains on: plain data that a script makes, and that every process reads in the same way."""

from __future__ import annotations

from graphft.data.datasets import Reference, being_imported, dataset
from graphft.data.describe import files
from graphft.data.randomness import python_states, seeded, seeded_by_torch
from graphft.data.spec import ChunkInfo, DataSpec, arrays

__all__ = [
    "ChunkInfo",
    "DataSpec",
    "Reference",
    "arrays",
    "being_imported",
    "dataset",
    "files",
    "python_states",
    "seeded",
    "seeded_by_torch",
]
