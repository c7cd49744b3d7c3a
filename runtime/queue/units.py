"""Units of local accumulation: up to so many consecutive batches of a chunk, claimed, pushed and recorded as one."""

from __future__ import annotations

from dataclasses import replace

from graphft.ops.context import ChunkWork
from graphft.plan import chunk_batch_seed


def batches_of(unit: ChunkWork, *, count: int, batch_size: int, seed: int, number: int = 0) -> list[ChunkWork]:
    """The batches of a unit, in order. `count`: of a whole unit; `seed`: the job's; `number`: of the first batch.

    Batches are those that the chunk has in any other mode, with their random seeds.
    """
    first = unit.batch * count
    return [
        replace(
            unit,
            batch=first + i,
            samples=min(batch_size, unit.samples - i * batch_size),
            number=number + i,
            seed=chunk_batch_seed(seed, unit.pass_index, unit.chunk, first + i),
        )
        for i in range(-(-unit.samples // batch_size))
    ]
