"""The pass plan belongs to the protocol, and to the transpiler, which counts a job's steps: see `graphft.plan`."""

from graphft.plan import (
    Located,
    PassPlan,
    Plan,
    PlannedChunk,
    batch_seed,
    chunk_batch_seed,
    mix,
    permutation,
    record_order,
)

__all__ = [
    "Located",
    "PassPlan",
    "Plan",
    "PlannedChunk",
    "batch_seed",
    "chunk_batch_seed",
    "mix",
    "permutation",
    "record_order",
]
