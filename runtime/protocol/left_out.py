"""What is left out of a job's data: records that made their batch fail too often. One etcd record for each chunk.

    /<job>.queue/left_out/<chunk> = LeftOut

An omission begins with the batch that failed, in its pass; the same records are left out of all later passes, whose
batches are made of other records. What was computed before stays as it was, so going back changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np

from graphft.errors import plain_text
from graphft.plan import Plan

FULL_REASONS = 50
"""Omissions of a chunk whose reasons are kept as they are; of those after them, `SHORT_REASON` characters."""
SHORT_REASON = 160
MAX_RECORD = 1 << 20
"""Bytes of a chunk's record: etcd takes 1.5 MB."""


class Omission(msgspec.Struct, frozen=True):
    """Left out because batch `batch` of pass `pass_index` failed. `rest`: and all batches of the chunk behind it."""

    pass_index: int
    batch: int
    reason: str
    failures: int = 1
    rest: bool = False
    records: tuple[int, ...] = ()
    """Positions in the chunk, where it is known which records of the batch are bad; (): all of them."""


class LeftOut(msgspec.Struct, frozen=True):
    """Of one chunk."""

    omissions: tuple[Omission, ...] = ()

    def having(self, omission: Omission) -> LeftOut:
        """With one more. Of many, only the first ones keep their reasons in full: the record has to stay small."""
        if len(self.omissions) >= FULL_REASONS:
            omission = msgspec.structs.replace(omission, reason=plain_text(omission.reason, SHORT_REASON))
        return LeftOut((*self.omissions, omission))

    def without_reasons(self) -> LeftOut:
        """What a process has to know that reads the chunk."""
        return LeftOut(tuple(msgspec.structs.replace(omission, reason="") for omission in self.omissions))


class Stored(Protocol):
    """A record as it was read from etcd."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes: ...


class ChunkOmissions:
    """What a chunk lacks in which pass: its LeftOut record, for the data of `plan`."""

    def __init__(self, plan: Plan, chunk: int, record: LeftOut) -> None:
        self._plan, self._chunk = plan, chunk
        self._positions = [(o.pass_index, positions_of(plan, chunk, o)) for o in record.omissions]

    def records(self, pass_index: int) -> frozenset[int]:
        """Positions in the chunk that the pass leaves out."""
        return frozenset().union(*(found for since, found in self._positions if since <= pass_index))

    def samples(self, pass_index: int, batch: int) -> int:
        """How many records of a batch are left."""
        return len(set(self._plan.positions(pass_index, self._chunk, batch).tolist()) - self.records(pass_index))

    def batches(self, pass_index: int) -> frozenset[int]:
        """Batches of which nothing is left."""
        return frozenset(b for b in range(int(self._plan.batches[self._chunk])) if not self.samples(pass_index, b))


def omissions_of(plan: Plan, record: Stored | None) -> ChunkOmissions | None:
    """Returns what a chunk's record in etcd says; None if there is none."""
    if record is None:
        return None
    return ChunkOmissions(plan, int(record.key.rsplit("/", 1)[1]), msgspec.json.decode(record.value, type=LeftOut))


def count_records(plan: Plan, left_out: Mapping[int, LeftOut]) -> int:
    """How many records of the data these leave out, by chunk; each is counted once."""
    return sum(len(ChunkOmissions(plan, chunk, found).records(plan.passes)) for chunk, found in left_out.items())


def positions_of(plan: Plan, chunk: int, omission: Omission) -> frozenset[int]:
    """The positions in the chunk of the records that it leaves out."""
    if omission.records:
        return frozenset(omission.records)
    last = int(plan.batches[chunk]) if omission.rest else omission.batch + 1
    found = [plan.positions(omission.pass_index, chunk, b) for b in range(omission.batch, last)]
    return frozenset(np.concatenate(found).tolist()) if found else frozenset()
