"""Units of local accumulation: up to so many consecutive batches of a chunk, claimed, pushed and recorded as one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphft.ops.context import ChunkWork
from graphft.plan import chunk_batch_seed


def batches_of(
    unit: ChunkWork, *, count: int, batch_size: int, seed: int, order: np.ndarray, number: int = 0
) -> list[ChunkWork]:
    """The batches of a unit that have samples, in order. `count`: of a whole unit; `seed`: the job's; `order`: the
    positions in the chunk of its records, as the pass reads them; `number`: of the first batch.

    Batches are those that the chunk has in any other mode, with their random seeds.
    """
    first, discarded = unit.batch * count, list(unit.without)
    batches = []
    for batch in range(first, min(first + count, -(-len(order) // batch_size))):
        records = order[batch * batch_size : (batch + 1) * batch_size]
        samples = len(records) - int(np.isin(records, discarded).sum())
        seed_of = chunk_batch_seed(seed, unit.pass_index, unit.chunk, batch)
        if samples:
            batches.append(replace(unit, batch=batch, samples=samples, number=number + batch - first, seed=seed_of))
    return batches
