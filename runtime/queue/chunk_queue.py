"""The interface to the records of a trainer's chunks, which have two independent implementations.

`etcd_queue.py`: trainers read and write them in etcd. `coordinator_queue.py`: trainers ask a coordinator for tasks.
What a trainer does with the chunks that it holds is in `sync_queue.py` and `async_queue.py`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from graphft.ops.context import ChunkWork, ClaimTerms, QueuePort
from graphft.plan import Located
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Generation, decode
from graphft.runtime.etcd import KV
from graphft.runtime.protocol.chunk_queue import ChunkDiscards
from graphft.runtime.protocol.events import ChunkKey

T = TypeVar("T")

CLAIM_BATCHES = 16
"""Async: several short chunks are claimed at a time, with so many batches in all."""


@dataclass(slots=True)
class Claim:
    """A chunk that this trainer works on. `progress`: its batches that are applied, as far as known.

    `revision`: the fence of what relies on the claim: the create_revision of its record, the number of the attempt with
    a coordinator, 0 without fault tolerance. `first_step`: sync, of its slot. `last`: async, the last computed batch.
    """

    key: ChunkKey
    batches: int
    revision: int = 0
    attempt: int = 0
    slot: int = -1
    first_step: int = 0
    last: int = -1
    progress: int = 0
    discards: ChunkDiscards | None = None
    renewed: float = field(default_factory=lambda: time.monotonic())

    @property
    def last_step(self) -> int:
        return self.first_step + self.batches - 1

    @property
    def discarded(self) -> frozenset[int]:
        """Returns the batches that no shard is to have."""
        return self.discards.batches(self.key[0]) if self.discards is not None else frozenset()

    def without_discarded(self, work: ChunkWork) -> ChunkWork:
        """Returns a batch (or unit) without the records that its pass discards, perhaps without any samples."""
        without = self.discards.records(work.pass_index) if self.discards is not None else frozenset()
        if self.discards is None or not without:
            return work
        return replace(work, samples=self.discards.samples(work.pass_index, work.batch), without=without)


def by_pass(claims: Iterable[Claim]) -> list[tuple[int, list[Claim]]]:
    """Returns the claims of each pass: a transaction, or a call, is about one pass."""
    found: defaultdict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        found[claim.key[0]].append(claim)
    return list(found.items())


def shard_generations(member: Member, acknowledged: Sequence[int]) -> list[KV] | None:
    """Returns each shard's record of the generation that has acknowledged; None if one is known to be in another."""
    known, found = member.watcher.snapshot(), []
    for shard, generation in enumerate(acknowledged):
        kv = known.get(member.keys.of_shard(shard).generation)
        record = decode(kv, Generation)
        if kv is None or record is None or record.number != generation:
            return None
        found.append(kv)
    return found


class ChunkQueue:
    """The records of one trainer's claims; this base keeps none. Methods may be repeated after a failure."""

    def begin_pass(self, index: int) -> None:
        """Makes the pass's records; a coordinator does that itself."""

    def complete(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Completes claims, all batches of which are applied. Returns those that are settled, by any trainer."""
        return claims

    def release(self, claims: Sequence[Claim]) -> None:
        """Gives claims back; their next holder goes on inside the chunks."""

    def fail(self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False) -> bool:
        """Counts a failure of a batch. `records`: positions in the chunk of those to blame, if known; `certain`: no
        trainer can read them. False: the claim is another's by now."""
        return False

    def forget(self, claims: Sequence[Claim]) -> None:
        """Forgets claims that are others' to make."""

    def renew(self, claims: Sequence[Claim], timeout: float) -> None:
        """Says that the own claims are worked on: some times in `timeout` seconds."""


class SlotQueue(ChunkQueue):
    """Sync: the pass plan says which chunks a slot has."""

    def claim(self, slot: int, group: Sequence[Located], terms: ClaimTerms) -> list[Claim]:
        """Claims these chunks of one pass for the slot. Raises WorkChanged if the slot is lost."""
        raise NotImplementedError


class OpenQueue(ChunkQueue):
    """Async: any trainer works on any chunk."""

    def take(self, terms: ClaimTerms) -> list[Claim]:
        """Claims some chunks. Raises EndOfPass when the pass has no more, NoData when others hold all that is left."""
        raise NotImplementedError

    def next_pass(self) -> int:
        """Returns the pass to go on with at the end of the trainer's own."""
        raise NotImplementedError


class Pace(Protocol):
    """The progress of a trainer, for any thread. `pass_index`: the pass that it works on; -1 before its first."""

    pass_index: int

    @property
    def pace(self) -> float:
        """Batches per second of late."""

    def alive_since(self, then: float) -> bool:
        """True if it has computed, or waited for others, after this time of the monotonic clock."""


class TrainerQueue(QueuePort):
    """Base of sync and async queues. `failing`: reports the batch that has just failed; `counted`: its result."""

    failing: Callable[[], bool] | None = None
    counted = False

    def fail(self) -> None:
        report, self.failing = self.failing, None
        self.counted = report() if report is not None else False


class BackgroundTasks:
    """Makes calls that a step need not wait for, one after the other, on one thread. Exceptions are raised by `wait`,
    or by the next `check`."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._open: deque[Future[object]] = deque()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes `call` after those before. The caller looks at its result."""
        return self._thread.submit(call)

    def run(self, call: Callable[[], object]) -> None:
        """Makes `call` after those before; `check` and `wait` look at its result."""
        self._open.append(self.submit(call))

    def check(self) -> None:
        """Raises what a finished call has raised."""
        while self._open and self._open[0].done():
            self._open.popleft().result()

    def wait(self) -> None:
        """Returns when all calls of `run` are made."""
        while self._open:
            self._open.popleft().result()

    def close(self) -> None:
        """Ends the thread after the present call; those that wait are not made."""
        self._thread.shutdown(cancel_futures=True)
