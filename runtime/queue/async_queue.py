"""The chunk queue of async training: any trainer works on any chunk.

`AsyncQueue` is the QueuePort: it goes through the chunks that it holds, batch by batch, as the shards lack them. Chunks
come from `Claims` (etcd's todo records) or, without fault tolerance, from the plan's `StaticAssignment`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from graphft.ir import Operator
from graphft.ops.context import ChunkWork, ClaimsPort, NoData, QueuePort
from graphft.plan import chunk_batch_seed
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.async_events import ChunkKey
from graphft.runtime.queue.chunk_claims import Claim, Claims
from graphft.runtime.queue.omissions import leave_out
from graphft.runtime.queue.pace import Pace
from graphft.runtime.queue.transactions import Terms, terms_of


class Source(Protocol):
    """Where chunks come from, and who is told what became of them."""

    def take(self) -> list[Claim]:
        """New chunks. Raises EndOfPass when the pass has no more, NoData when others hold all that is left."""

    def complete(self, claims: list[Claim]) -> list[Claim]:
        """Completes wholly applied chunks; returns those that are settled, by whomever."""


class Ledgers(Protocol):
    """What the queue asks of the trainer's side of the data plane: what the shards have of the chunks at hand."""

    def took(self, key: ChunkKey, batches: int, left_out: frozenset[int]) -> None: ...
    def dropped(self, key: ChunkKey) -> None: ...
    def await_ledgers(self, key: ChunkKey) -> None: ...
    def whole(self, key: ChunkKey) -> bool: ...
    def progress(self, key: ChunkKey) -> int: ...
    def next_batch(self, key: ChunkKey, last: int) -> int | None: ...
    def generations(self) -> list[int]: ...


class AsyncQueue(QueuePort, ClaimsPort):
    """The QueuePort and the ClaimsPort of an async trainer: the main thread's, and the daemon thread's.

    `op`: its program's `etcd_get_chunk`; None: it works on its share of the plan. `read_ahead` begins to make a batch
    that will be wanted.
    """

    def __init__(
        self, member: Member, op: Operator | None, ledgers: Ledgers, pace: Pace, read_ahead: Callable[[ChunkWork], None]
    ) -> None:
        self.member, self.plan, self.ledgers, self.pace = member, member.config.plan, ledgers, pace
        self.read_ahead = read_ahead
        self.claims: dict[ChunkKey, Claim] = {}
        self.records = Claims(member, pace, ledgers.generations, terms_of(op)) if op is not None else None
        self.source: Source = self.records or StaticAssignment(member)

    # -- QueuePort ----------------------------------------------------------------------------------------------

    def claim_chunk(self, timeout: float, max_failures: int, max_discarded: int) -> ChunkWork:
        assert self.records is not None
        self.records.terms = Terms(timeout, max_failures, max_discarded)
        return self.planned_chunk()

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
        assert self.records is not None
        self.records.enqueue(self.pace.pass_index)

    def requeue_stale(self, timeout: float) -> None:
        assert self.records is not None
        self.records.renew(timeout, self.claims)

    # -- for the trainer ----------------------------------------------------------------------------------------

    def next_pass(self) -> int:
        """The pass to go on with at the end of the trainer's own."""
        assert self.records is not None
        return self.records.next_pass()

    def release_all(self) -> None:
        """Gives all chunks back; others go on with them where the shards' ledgers say."""
        self._complete_whole()
        for claim in list(self.claims.values()):
            if self.records is not None:
                self.records.release(claim)
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
        if self.records is None or claim is None:
            return False
        batch = claim.last if batch is None else batch
        return self.records.fail(claim, batch, reason, records, certain) is not None

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
        if claim.last < 0 and claim.attempt > 1 and claim.progress:
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


class StaticAssignment:
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
