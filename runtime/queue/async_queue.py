"""The chunk queue of async training: any trainer works on any chunk.

`AsyncQueue` is the QueuePort: it goes through the chunks that it holds, batch by batch, as the shards lack them. Chunks
come from `Claims` (etcd's todo records) or, without fault tolerance, from the plan's `StaticAssignment`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from graphft.ops.context import ChunkWork, ClaimsPort, NoData, QueuePort, TasksPort
from graphft.plan import chunk_batch_seed
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.async_events import ChunkKey
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.queue.chunk_claims import Claim, Claims
from graphft.runtime.queue.omissions import leave_out
from graphft.runtime.queue.pace import Pace
from graphft.runtime.queue.transactions import Terms


class Source(Protocol):
    """Where chunks come from, and who is told what became of them."""

    def take(self) -> list[Claim]:
        """New chunks. Raises EndOfPass when the pass has no more, NoData when others hold all that is left."""

    def next_pass(self) -> int:
        """The pass to go on with at the end of the trainer's own."""

    def complete(self, claims: list[Claim]) -> list[Claim]:
        """Completes wholly applied chunks; returns those that are settled, by whomever."""

    def release(self, claims: list[Claim]) -> None:
        """Gives chunks back, and whatever is held besides."""

    def fail(
        self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> Change | None:
        """Counts a failure of a batch; None: the claim is another's by now."""

    def renew(self, timeout: float, mine: Mapping[ChunkKey, Claim]) -> None:
        """Some times in `timeout` seconds: says that the own claims are worked on."""


class Ledgers(Protocol):
    """What the queue asks of the trainer's side of the data plane: what the shards have of the chunks at hand."""

    def took(self, key: ChunkKey, batches: int, left_out: frozenset[int]) -> None: ...
    def dropped(self, key: ChunkKey) -> None: ...
    def await_ledgers(self, key: ChunkKey) -> None: ...
    def whole(self, key: ChunkKey) -> bool: ...
    def progress(self, key: ChunkKey) -> int: ...
    def next_batch(self, key: ChunkKey, last: int) -> int | None: ...
    def generations(self) -> list[int]: ...


class AsyncQueue(QueuePort, ClaimsPort, TasksPort):
    """The QueuePort, ClaimsPort and TasksPort of an async trainer: the main thread's, and the daemon thread's.

    `read_ahead` begins to make a batch that will be wanted.
    """

    def __init__(
        self, member: Member, source: Source, ledgers: Ledgers, pace: Pace, read_ahead: Callable[[ChunkWork], None]
    ) -> None:
        self.member, self.plan, self.ledgers, self.pace = member, member.config.plan, ledgers, pace
        self.read_ahead = read_ahead
        self.claims: dict[ChunkKey, Claim] = {}
        self.source = source
        self.failing: Callable[[], bool] | None = None
        """Reports the batch that has just failed; whether that was `counted`."""
        self.counted = False

    # -- QueuePort ----------------------------------------------------------------------------------------------

    def claim_chunk(self, timeout: float, max_failures: int, max_discarded: int) -> ChunkWork:
        self._etcd.terms = Terms(timeout, max_failures, max_discarded)
        return self.planned_chunk()

    @property
    def _etcd(self) -> Claims:
        """The source, of a program that has the operators of the queue in etcd."""
        assert isinstance(self.source, Claims)
        return self.source

    def planned_chunk(self) -> ChunkWork:
        work = self._next()
        if work is None:
            self._complete_whole()
            if self.claims:
                raise NoData  # what is left waits for a shard
            for claim in self.source.take():
                self.claims[claim.key] = claim
                self.ledgers.took(claim.key, claim.batches, claim.left_out)
            work = self._next()
        if work is None:
            raise NoData
        self._read_ahead(work)
        return work

    def complete_chunks(self) -> None:
        if all(self.ledgers.whole(key) for key in self.claims):  # those claimed together, together
            self._complete_whole()

    def _complete_whole(self) -> None:
        whole = [c for c in self.claims.values() if self.ledgers.whole(c.key)]
        for claim in self.source.complete(whole) if whole else ():
            self._drop(claim)

    def enqueue_pass(self) -> None:
        self._etcd.enqueue(self.pace.pass_index)

    def requeue_stale(self, timeout: float) -> None:
        self._etcd.renew(timeout, self.claims)

    # -- TasksPort ----------------------------------------------------------------------------------------------

    def get_task(self) -> ChunkWork:
        return self.planned_chunk()

    def finish_tasks(self) -> None:
        self.complete_chunks()

    def fail_task(self) -> None:
        report, self.failing = self.failing, None
        self.counted = report() if report is not None else False

    def renew_tasks(self, timeout: float) -> None:
        self.source.renew(timeout, self.claims)

    # -- for the trainer ----------------------------------------------------------------------------------------

    def next_pass(self) -> int:
        """The pass to go on with at the end of the trainer's own."""
        return self.source.next_pass()

    def release_all(self) -> None:
        """Gives all chunks back; others go on with them where the shards' ledgers say."""
        self._complete_whole()
        claims = list(self.claims.values())
        self.source.release(claims)
        for claim in claims:
            self._drop(claim)

    def report_failure(
        self,
        key: ChunkKey,
        reason: str,
        batch: int | None = None,
        records: Collection[int] = (),
        *,
        certain: bool = False,
    ) -> bool:
        """This batch of a claimed chunk (None: the one that was begun last) cannot be computed. From any thread.

        `records`: positions in the chunk of those to blame, if known; `certain`: no trainer can read them. Returns
        whether the queue knows now.
        """
        claim = self.claims.get(key)
        if claim is None:
            return False
        batch = claim.last if batch is None else batch
        return self.source.fail(claim, batch, reason, records, certain) is not None

    def drop(self, key: ChunkKey) -> None:
        """The chunk is not this trainer's any more, if it was."""
        if key in self.claims:
            self._drop(self.claims[key])

    def _next(self) -> ChunkWork | None:
        """The next batch that a shard lacks, of the chunk that was taken first."""
        for claim in self.claims.values():
            self.ledgers.await_ledgers(claim.key)
            batch = self.ledgers.next_batch(claim.key, claim.last)
            if batch is not None:
                self._note(claim)
                claim.last = batch
                return self._work(claim, batch)
        return None

    def _note(self, claim: Claim) -> None:
        """Progress that holders before made, and did not live to tell, is told at once: nothing is held against it."""
        claim.progress = self.ledgers.progress(claim.key)
        if claim.last < 0 and claim.progress:
            claim.renewed = float("-inf")

    def _work(self, claim: Claim, batch: int) -> ChunkWork:
        (pass_index, chunk), size = claim.key, self.plan.batch_size
        seed = chunk_batch_seed(self.member.config.seed, pass_index, chunk, batch)
        samples = min(size, self.plan.records[chunk] - batch * size)
        work = ChunkWork(pass_index, chunk, batch, samples, seed, claim.attempt, claim.revision)
        return leave_out(work, claim.omissions)

    def _read_ahead(self, work: ChunkWork) -> None:
        claim = self.claims[work.pass_index, work.chunk]
        if work.batch + 1 < claim.batches:
            self.read_ahead(self._work(claim, work.batch + 1))
        for other in list(self.claims.values())[1:2]:
            self.read_ahead(self._work(other, 0))

    def _drop(self, claim: Claim) -> None:
        del self.claims[claim.key]
        self.ledgers.dropped(claim.key)


class StaticAssignment(Source):
    """Without fault tolerance: trainer i of T works on chunks i, i + T, ... of each pass's order, pass by pass."""

    def __init__(self, member: Member) -> None:
        plan, index, trainers = member.config.plan, member.index, member.config.trainers
        self._left = (
            Claim((p, c.chunk), c.batches) for p in range(plan.passes) for c in plan.chunks_of(p)[index::trainers]
        )

    def take(self) -> list[Claim]:
        claim = next(self._left, None)
        if claim is None:
            raise NoData  # this trainer's work is done; the job may go on
        return [claim]

    def complete(self, claims: list[Claim]) -> list[Claim]:
        return claims

    def next_pass(self) -> int:
        raise NoData  # the passes follow one another in what is left

    def release(self, claims: list[Claim]) -> None:
        """Nothing is recorded."""

    def fail(
        self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> Change | None:
        return None

    def renew(self, timeout: float, mine: Mapping[ChunkKey, Claim]) -> None:
        """Nothing is recorded."""
