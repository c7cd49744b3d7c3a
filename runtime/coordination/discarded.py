"""Lists what a job has discarded of its data, for its user: `discarded.jsonl` in its folder, once it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.disk.fileio import read_regular, write_atomically
from graphft.errors import GraphftError
from graphft.runtime.protocol.chunk_queue import Discards, positions_of

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig

FILE = "discarded.jsonl"
LISTED = 5
"""Numbers of records that are named in one line."""


class Discarded(msgspec.Struct, frozen=True):
    """Records that are discarded since a batch failed: of that batch's pass and of all later ones.

    `records`: their numbers in the data, ascending. `batch`: of the chunk (with local accumulation, its unit).
    `reason`: the error of the last time.
    """

    pass_index: int
    chunk: int
    batch: int
    records: tuple[int, ...]
    reason: str


def discarded_of(config: JobConfig, discarded: Mapping[int, Discards]) -> tuple[Discarded, ...]:
    """Returns them in the order of passes, chunks and batches. `discarded`: by chunk, as etcd has it."""
    found, first_records = [], config.data.first_records()
    for chunk, record in discarded.items():
        start = first_records[chunk]
        for discard in record.discards:
            positions = sorted(positions_of(config.plan, chunk, discard))
            numbers = tuple(start + position for position in positions)
            found.append(Discarded(discard.pass_index, chunk, discard.batch, numbers, discard.reason))
    return tuple(sorted(found, key=lambda d: (d.pass_index, d.chunk, d.batch)))


def write_discarded(job_dir: Path, found: Sequence[Discarded]) -> None:
    """Makes the file be there exactly if anything was discarded."""
    if found:
        write_atomically(job_dir / FILE, b"".join(msgspec.json.encode(one) + b"\n" for one in found))
    else:
        (job_dir / FILE).unlink(missing_ok=True)


def read_discarded(job_dir: Path) -> tuple[Discarded, ...]:
    """Of a complete job. Raises GraphftError if the file is damaged."""
    try:
        lines = read_regular(job_dir / FILE).splitlines()
    except FileNotFoundError:
        return ()
    try:
        return tuple(msgspec.json.decode(line, type=Discarded) for line in lines)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GraphftError(f"{job_dir / FILE} is damaged: {error}", rule="load") from error


def describe_discarded(found: Sequence[Discarded], total: int, where: str = f"Result.discarded, {FILE}") -> str:
    """In one line; "" for nothing. `total`: records of the data. `where`: all of them are told."""
    if not found:
        return ""
    numbers = sorted({number for one in found for number in one.records})
    listed = ", ".join(map(str, numbers[:LISTED])) + f" and {len(numbers) - LISTED} more" * (len(numbers) > LISTED)
    first = found[0]
    return (
        f"{len(numbers)} of {total} records were DISCARDED, as their batches failed: {listed}; the first in chunk "
        f"{first.chunk}: {first.reason} (all of them: {where})"
    )
