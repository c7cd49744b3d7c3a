"""Defines who keeps the records of a trainer's chunks: an interface with two implementations that know nothing of each
other.

`etcd_queue.py`: trainers read and write the records in etcd. `coordinator_queue.py`: a coordinator has the queue, and
trainers ask it for tasks. What a trainer does with the chunks that it holds is in `sync_queue.py` and `async_queue.py`.
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
"""Async: short chunks are claimed several at a time, until there are so many batches."""


@dataclass(slots=True)
class Claim:
    """A chunk that this trainer works on, and of which `progress` batches are applied, as far as known.

    `revision`: of the pending record's creation (with a coordinator, the number of the attempt): the fence of what
    relies on the claim; 0 without fault tolerance. `discards`: what is discarded of the chunk. Sync: `first_step`, of
    its slot. Async: `last`, the batch that was computed last.
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
        """Batches that no shard is to have."""
        return self.discards.batches(self.key[0]) if self.discards is not None else frozenset()

    def without_discarded(self, work: ChunkWork) -> ChunkWork:
        """Returns a batch (or unit) without the records that its pass discards; perhaps it has no samples then."""
        without = self.discards.records(work.pass_index) if self.discards is not None else frozenset()
        if self.discards is None or not without:
            return work
        return replace(work, samples=self.discards.samples(work.pass_index, work.batch), without=without)


def by_pass(claims: Iterable[Claim]) -> list[tuple[int, list[Claim]]]:
    """Returns the claims of each pass: a transaction, or a call, is about one."""
    found: defaultdict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        found[claim.key[0]].append(claim)
    return list(found.items())


def shard_generations(member: Member, acknowledged: Sequence[int]) -> list[KV] | None:
    """Returns each shard's record of the generation whose acknowledgements a trainer has; None if one is known to be in
    another."""
    known, found = member.watcher.snapshot(), []
    for shard, generation in enumerate(acknowledged):
        kv = known.get(member.keys.of_shard(shard).generation)
        record = decode(kv, Generation)
        if kv is None or record is None or record.number != generation:
            return None
        found.append(kv)
    return found


class ChunkQueue:
    """The records of one trainer's claims; this one keeps none. A method may be called again after a failure: it looks
    before it changes."""

    def begin_pass(self, index: int) -> None:
        """Makes the pass's records (a coordinator does that itself)."""

    def complete(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """All batches of the claims are applied. Returns the claims that are settled, by whomever."""
        return claims

    def release(self, claims: Sequence[Claim]) -> None:
        """Gives claims back. Their next holder goes on inside the chunks."""

    def fail(self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False) -> bool:
        """Counts a failure of a batch. `records`: positions in the chunk of those to blame, if known; `certain`: no
        trainer can read them. False: the claim is another's by now."""
        return False

    def forget(self, claims: Sequence[Claim]) -> None:
        """The claims are others' to make."""

    def renew(self, claims: Sequence[Claim], timeout: float) -> None:
        """Some times in `timeout` seconds: says that the own claims are worked on."""


class SlotQueue(ChunkQueue):
    """Sync: the pass plan says which chunks are a slot's."""

    def claim(self, slot: int, group: Sequence[Located], terms: ClaimTerms) -> list[Claim]:
        """Claims these chunks of one pass for the slot. Raises WorkChanged when that is not this trainer's any more."""
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
    """Tells how a trainer gets on. From any thread."""

    pass_index: int
    """The pass that it works on; -1 before its first."""

    @property
    def pace(self) -> float:
        """Batches per second of late."""

    def alive_since(self, then: float) -> bool:
        """True if it has computed, or waited for others as it should, after this time of the monotonic clock."""


class TrainerQueue(QueuePort):
    """The base of the queues of sync and async trainers. `failing`: reports the batch that has just failed; `counted`:
    what that returned."""

    failing: Callable[[], bool] | None = None
    counted = False

    def fail(self) -> None:
        report, self.failing = self.failing, None
        self.counted = report() if report is not None else False


class BackgroundTasks:
    """Calls that a step need not wait for: one thread makes them, one after the other. Used by one thread. What a call
    raises is raised to it: by `wait`, or by the next `check`."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._open: deque[Future[object]] = deque()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes `call` after those that were submitted before. The caller looks at its result."""
        return self._thread.submit(call)

    def run(self, call: Callable[[], object]) -> None:
        """Makes `call` in the same order; `check` and `wait` look at how it ended."""
        self._open.append(self.submit(call))

    def check(self) -> None:
        """Raises what a call that was run has raised since."""
        while self._open and self._open[0].done():
            self._open.popleft().result()

    def wait(self) -> None:
        """Returns when all calls that were run are made."""
        while self._open:
            self._open.popleft().result()

    def close(self) -> None:
        """Ends the thread after the call that it is making; those that wait are not made."""
        self._thread.shutdown(cancel_futures=True)
