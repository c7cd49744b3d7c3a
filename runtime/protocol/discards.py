"""Records what is discarded of a job's data: records that made their batch fail too often. One etcd record for each
chunk.

    /<job>.queue/discarded/<chunk> = Discards

It begins with the batch that failed, in its pass; the same records are discarded in all later passes, whose
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
"""Those of a chunk whose reasons are kept as they are; of those after them, `SHORT_REASON` characters."""
SHORT_REASON = 160
MAX_RECORD = 1 << 20
"""Bytes of a chunk's record: etcd takes 1.5 MB."""


class Discard(msgspec.Struct, frozen=True):
    """Left out because batch `batch` of pass `pass_index` failed. `rest`: and all batches of the chunk behind it."""

    pass_index: int
    batch: int
    reason: str
    failures: int = 1
    rest: bool = False
    records: tuple[int, ...] = ()
    """Positions in the chunk, where it is known which records of the batch are bad; (): all of them."""


class Discards(msgspec.Struct, frozen=True):
    """Of one chunk."""

    discards: tuple[Discard, ...] = ()

    def having(self, discard: Discard) -> Discards:
        """With one more. Of many, only the first ones keep their reasons in full: the record has to stay small."""
        if len(self.discards) >= FULL_REASONS:
            discard = msgspec.structs.replace(discard, reason=plain_text(discard.reason, SHORT_REASON))
        return Discards((*self.discards, discard))

    def without_reasons(self) -> Discards:
        """Returns the part that a process needs that reads the chunk."""
        return Discards(tuple(msgspec.structs.replace(discard, reason="") for discard in self.discards))


class Stored(Protocol):
    """A record as it was read from etcd."""

    @property
    def key(self) -> str: ...
    @property
    def value(self) -> bytes: ...


class ChunkDiscards:
    """Tells what a chunk lacks in which pass: its Discards record, for the data of `plan`."""

    def __init__(self, plan: Plan, chunk: int, record: Discards) -> None:
        self._plan, self._chunk = plan, chunk
        self._positions = [(o.pass_index, positions_of(plan, chunk, o)) for o in record.discards]

    def records(self, pass_index: int) -> frozenset[int]:
        """Positions in the chunk that the pass discards."""
        return frozenset().union(*(found for since, found in self._positions if since <= pass_index))

    def samples(self, pass_index: int, batch: int) -> int:
        """Returns the number of records of a batch that are left."""
        return len(set(self._plan.positions(pass_index, self._chunk, batch).tolist()) - self.records(pass_index))

    def batches(self, pass_index: int) -> frozenset[int]:
        """Batches of which nothing is left."""
        return frozenset(b for b in range(int(self._plan.batches[self._chunk])) if not self.samples(pass_index, b))


def discards_of(plan: Plan, record: Stored | None) -> ChunkDiscards | None:
    """Returns what a chunk's record in etcd says; None if there is none."""
    if record is None:
        return None
    return ChunkDiscards(plan, int(record.key.rsplit("/", 1)[1]), msgspec.json.decode(record.value, type=Discards))


def count_records(plan: Plan, discarded: Mapping[int, Discards]) -> int:
    """Returns the number of records that are discarded; each is counted once."""
    return sum(len(ChunkDiscards(plan, chunk, found).records(plan.passes)) for chunk, found in discarded.items())


def positions_of(plan: Plan, chunk: int, discard: Discard) -> frozenset[int]:
    """The positions in the chunk of the records that it discards."""
    if discard.records:
        return frozenset(discard.records)
    last = int(plan.batches[chunk]) if discard.rest else discard.batch + 1
    found = [plan.positions(discard.pass_index, chunk, b) for b in range(discard.batch, last)]
    return frozenset(np.concatenate(found).tolist()) if found else frozenset()
