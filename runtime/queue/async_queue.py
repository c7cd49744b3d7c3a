"""The chunk queue of async training: any trainer works on any chunk, on the batches that the shards lack."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol

import numpy as np

from graphft.ops.context import NO_TERMS, ChunkWork, ClaimTerms, NoData
from graphft.plan import chunk_batch_seed
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.async_trainer import AsyncTrainer
from graphft.runtime.protocol.events import ChunkKey, Dropped, Took
from graphft.runtime.protocol.machine import Event
from graphft.runtime.queue.chunk_queue import Claim, OpenQueue, Pace, TrainerQueue


class Ledgers(Protocol):
    """Declares what the queue needs of a trainer's data plane, whose machine knows what the shards have of the
    chunks."""

    machine: AsyncTrainer

    def do(self, event: Event) -> None: ...
    def await_ledgers(self, key: ChunkKey) -> None: ...


class AsyncQueue(TrainerQueue):
    """The QueuePort of an async trainer, for its main thread; `renew` is for the daemon thread. `read_ahead` begins to
    make a batch that will be wanted."""

    def __init__(
        self, member: Member, records: OpenQueue, ledgers: Ledgers, pace: Pace, read_ahead: Callable[[ChunkWork], None]
    ) -> None:
        self.member, self.plan, self.ledgers, self.pace = member, member.config.plan, ledgers, pace
        self.records, self.read_ahead = records, read_ahead
        self.claims: dict[ChunkKey, Claim] = {}

    # -- QueuePort ----------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self.records.begin_pass(self.pace.pass_index)

    def get(self, terms: ClaimTerms = NO_TERMS) -> ChunkWork:
        work = self._next()
        if work is None:
            self._complete_whole()
            if self.claims:
                raise NoData  # what is left waits for a shard
            for claim in self.records.take(terms):
                self.claims[claim.key] = claim
                self.ledgers.do(Took(claim.key, claim.batches, claim.discarded))
            work = self._next()
        if work is None:
            raise NoData
        self._read_ahead(work)
        return work

    def complete(self) -> None:
        if all(self.ledgers.machine.whole(key) for key in self.claims):  # those claimed together, together
            self._complete_whole()

    def _complete_whole(self) -> None:
        whole = [c for c in self.claims.values() if self.ledgers.machine.whole(c.key)]
        for claim in self.records.complete(whole) if whole else ():
            self.drop(claim.key)

    def renew(self, timeout: float) -> None:
        self.records.renew(list(self.claims.values()), timeout)

    # -- for the trainer ----------------------------------------------------------------------------------------

    def next_pass(self) -> int:
        return self.records.next_pass()

    def release_all(self) -> None:
        """Gives all chunks back; others go on where the shards' ledgers say."""
        self._complete_whole()
        claims = list(self.claims.values())
        self.records.release(claims)
        for claim in claims:
            self.drop(claim.key)

    def report_failure(
        self,
        key: ChunkKey,
        reason: str,
        batch: int | None = None,
        records: Collection[int] = (),
        *,
        certain: bool = False,
    ) -> bool:
        """Counts a failure of this batch of a claimed chunk (None: of the last one): see `ChunkQueue.fail`. From any
        thread. True if the failure is recorded."""
        claim = self.claims.get(key)
        if claim is None:
            return False
        return self.records.fail(claim, claim.last if batch is None else batch, reason, records, certain)

    def drop(self, key: ChunkKey) -> None:
        """Forgets a chunk that is not this trainer's any more."""
        if self.claims.pop(key, None) is not None:
            self.ledgers.do(Dropped(key))

    def _next(self) -> ChunkWork | None:
        """Returns the next batch that a shard lacks, of the first chunk that was taken."""
        for claim in self.claims.values():
            self.ledgers.await_ledgers(claim.key)
            batch = self.ledgers.machine.next_batch(claim.key, claim.last)
            if batch is not None:
                self._note(claim)
                claim.last = batch
                return self._work(claim, batch)
        return None

    def _note(self, claim: Claim) -> None:
        """Has progress told at once that holders before had made, so that their end does not count as a failure."""
        claim.progress = self.ledgers.machine.progress(claim.key)
        if claim.last < 0 and claim.progress:
            claim.renewed = float("-inf")

    def _work(self, claim: Claim, batch: int) -> ChunkWork:
        (pass_index, chunk), size = claim.key, self.plan.batch_size
        seed = chunk_batch_seed(self.member.config.seed, pass_index, chunk, batch)
        samples = min(size, self.plan.records[chunk] - batch * size)
        work = ChunkWork(pass_index, chunk, batch, samples, seed, claim.attempt, claim.revision)
        return claim.without_discarded(work)

    def _read_ahead(self, work: ChunkWork) -> None:
        claim = self.claims[work.pass_index, work.chunk]
        if work.batch + 1 < claim.batches:
            self.read_ahead(self._work(claim, work.batch + 1))
        for other in list(self.claims.values())[1:2]:
            self.read_ahead(self._work(other, 0))


class StaticAssignment(OpenQueue):
    """Without fault tolerance: trainer i of T works on chunks i, i + T, ... of each pass. Nothing is recorded."""

    def __init__(self, member: Member) -> None:
        plan, index, trainers = member.config.plan, member.index, member.config.trainers
        self._left = (
            Claim((p, c.chunk), c.batches) for p in range(plan.passes) for c in plan.chunks_of(p)[index::trainers]
        )

    def take(self, terms: ClaimTerms) -> list[Claim]:
        claim = next(self._left, None)
        if claim is None:
            raise NoData  # this trainer's work is done; the job may go on
        return [claim]

    def next_pass(self) -> int:
        raise NoData  # the passes follow one another in what is left


def batches_of(
    unit: ChunkWork, *, count: int, batch_size: int, seed: int, order: np.ndarray, number: int = 0
) -> list[ChunkWork]:
    """Returns the batches of a unit that have samples, which are those of any other mode, with their random seeds.

    `count`: batches of a whole unit; `seed`: the job's; `order`: positions in the chunk, as the pass reads them;
    `number`: of the first batch.
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
