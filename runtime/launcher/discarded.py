"""What a job has left out of its data, for its user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphft.runtime.protocol.left_out import LeftOut, positions_of

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


@dataclass(frozen=True, slots=True)
class Discarded:
    """Records that are left out since a batch failed: of that batch's pass and of all later ones.

    `records`: their numbers in the data, ascending. `batch`: of the chunk (with local accumulation, its unit).
    `reason`: the error of the last time.
    """

    pass_index: int
    chunk: int
    batch: int
    records: tuple[int, ...]
    reason: str


def discarded_of(config: JobConfig, left_out: Mapping[int, LeftOut]) -> tuple[Discarded, ...]:
    """In the order of passes, chunks and batches. `left_out`: by chunk, as etcd has it."""
    found = []
    for chunk, record in left_out.items():
        start = config.data.chunks[chunk].start
        for omission in record.omissions:
            positions = sorted(positions_of(config.plan, chunk, omission))
            numbers = tuple(start + position for position in positions)
            found.append(Discarded(omission.pass_index, chunk, omission.batch, numbers, omission.reason))
    return tuple(sorted(found, key=lambda d: (d.pass_index, d.chunk, d.batch)))


def describe_discarded(found: tuple[Discarded, ...], total: int) -> str:
    """In one line; "" for nothing. `total`: records of the data."""
    if not found:
        return ""
    count = len({number for one in found for number in one.records})
    first = found[0]
    return (
        f"{count} of {total} records were DISCARDED, as their batches failed; first chunk {first.chunk}, records "
        f"{first.records[0]} to {first.records[-1]}: {first.reason} (all of them: Result.discarded)"
    )
