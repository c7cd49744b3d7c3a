"""The chunk queue of sync training.

The pass plan says which chunk a slot works on, so claims never contend; the records say what is todo, pending and done,
and count failures. Of a batch that is discarded, the slot contributes "empty". A step waits for none of it: chunks are
claimed under the slot's key some steps before they are begun, and completed later (`BackgroundTasks`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from graphft.ops.context import NO_TERMS, ChunkWork, ClaimTerms, Context, NoData, WorkChanged
from graphft.plan import Located, batch_seed
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.events import ChunkKey
from graphft.runtime.queue.chunk_queue import BackgroundTasks, Claim, Pace, SlotQueue, TrainerQueue

if TYPE_CHECKING:
    from graphft.runtime.protocol.events import Work

AHEAD = 8
"""Steps before its first one at which a chunk is claimed, but in the second half of the chunk before."""
CLAIM_SECONDS = 1.0
"""Chunks worth so much time are claimed at once, ..."""
CLAIM_CHUNKS = 24
"""... but no more of them: a transaction of etcd has at most 128 operations."""


class Shards(Protocol):
    """Declares what the queue needs of a trainer's side of the data plane: the lowest version among the shards (-1:
    unknown), the slots that the trainer holds, with the revisions of their claims, and the generation."""

    def lowest(self) -> int: ...
    def slots(self) -> list[int]: ...
    def claim_of(self, slot: int) -> int: ...
    @property
    def generation(self) -> int: ...


class SyncQueue(TrainerQueue):
    """The QueuePort of a sync trainer. `records`: None without fault tolerance, which only follows the plan. `ctx`: has
    the (step, slot) that is computed."""

    def __init__(self, member: Member, records: SlotQueue | None, ctx: Context, shards: Shards, pace: Pace) -> None:
        self.member, self.plan = member, member.config.plan
        self.records, self.ctx, self.shards, self.pace = records, ctx, shards, pace
        self.claims: dict[ChunkKey, Claim] = {}
        self._begun: dict[ChunkKey, tuple[int, Future[None]]] = {}
        """Claims that are being made, with their slot."""
        self._background = BackgroundTasks("queue")

    # -- QueuePort ----------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        assert self.records is not None
        self.records.begin_pass(self.plan.pass_of(self.ctx.step))

    def get(self, terms: ClaimTerms = NO_TERMS) -> ChunkWork:
        located = self.plan.locate(self.ctx.step, self.ctx.slot)
        if located is None:
            raise NoData
        if self.records is not None:
            self._claim(self.ctx.slot, located, terms)
            self._claim_ahead(self.ctx.slot, located, terms)
        work = self.work_of(located)
        if not work.samples:
            raise NoData
        return work

    def work_of(self, located: Located) -> ChunkWork:
        seed = batch_seed(self.member.config.seed, self.ctx.step, self.ctx.slot)
        claim = self.claims.get((located.pass_index, located.chunk))
        work = ChunkWork(located.pass_index, located.chunk, located.batch, located.samples, seed)
        return claim.without_discarded(replace(work, claim=claim.revision)) if claim is not None else work

    def complete(self) -> None:
        """Completes together what was claimed together."""
        self._background.check()
        lowest, claims = self.shards.lowest(), list(self.claims.values())
        unfinished = {claim.revision for claim in claims if claim.last_step >= lowest}
        self._leave_completing([claim for claim in claims if claim.revision not in unfinished])

    def renew(self, timeout: float) -> None:
        assert self.records is not None
        self.records.renew(self._with_progress(list(self.claims.values())), timeout)

    # -- for the trainer ----------------------------------------------------------------------------------------

    def expects(self, located: Located) -> bool:
        """True if a batch will be computed by this trainer, as far as known."""
        return self.records is None or (located.pass_index, located.chunk) in self.claims

    def release(self, slot: int) -> None:
        """Completes the slot's chunks that are applied, and gives the others back: its next holder goes on in them."""
        held = self._leave(slot)
        if self.records is not None and held:
            self.records.release(self._with_progress(held))

    def rolled_back(self) -> None:
        """Releases everything, as a new generation began."""
        for slot in {claim.slot for claim in list(self.claims.values())} | {slot for slot, _ in self._begun.values()}:
            self.release(slot)

    def lost(self, slot: int) -> None:
        """Completes what is applied of a slot that is another trainer's now, and forgets its other claims."""
        held = self._leave(slot)
        if self.records is not None:
            self.records.forget(held)

    def _leave(self, slot: int) -> list[Claim]:
        """Begins to complete what is applied of a slot, and returns the rest, which is held no more."""
        self._await_claims(slot)
        lowest = self.shards.lowest()
        mine = [claim for claim in list(self.claims.values()) if claim.slot == slot]
        self._leave_completing([claim for claim in mine if claim.last_step < lowest])
        held = [claim for claim in mine if claim.last_step >= lowest]
        for claim in held:
            del self.claims[claim.key]
        return held

    def settle(self) -> None:
        """Returns when everything that is done is recorded."""
        self._background.wait()

    def close(self) -> None:
        self._background.close()

    def report_failure(self, work: Work, reason: str, records: Collection[int] = (), *, certain: bool = False) -> bool:
        """Counts a failure of the batch of (step, slot): see `ChunkQueue.fail`. After too many in a row the batch is
        discarded, and a new generation begins: a holder before may have sent it to some of the shards. True if the
        failure is recorded."""
        located = self.plan.locate(work.step, work.slot)
        if located is None:
            return False
        return self.report_batch(located.pass_index, located.chunk, located.batch, reason, records, certain)

    def report_batch(
        self, pass_index: int, chunk: int, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> bool:
        """Does as `report_failure` for a batch of a claimed chunk."""
        claim = self.claims.get((pass_index, chunk))
        if claim is None or self.records is None:
            return False
        return self.records.fail(claim, batch, reason, records, certain)

    def forget_claims(self) -> None:
        """Forgets all claims after the last step: the first shard completes them."""
        for slot in {slot for slot, _ in self._begun.values()}:
            self._await_claims(slot)
        self.claims.clear()

    # -- transactions -------------------------------------------------------------------------------------------

    def _claim(self, slot: int, located: Located, terms: ClaimTerms) -> None:
        """Returns when the chunk is claimed."""
        key = located.pass_index, located.chunk
        if key not in self.claims:
            self._begin_claims(slot, located, terms)
        if key in self._begun:
            self._join(key)

    def _claim_ahead(self, slot: int, located: Located, terms: ClaimTerms) -> None:
        """Begins to claim the chunks that follow this one in the pass, when it is time to."""
        batches = int(self.plan.batches[located.chunk])
        if located.batch >= batches - min(AHEAD, batches // 2):
            following = self._following(slot, located)
            if following is not None and self._unknown(following):
                self._begin_claims(slot, following, terms)

    def _following(self, slot: int, located: Located) -> Located | None:
        """The slot's next chunk in the same pass: the next pass has no records yet."""
        following = self.plan.locate(located.chunk_start_step + int(self.plan.batches[located.chunk]), slot)
        return following if following is not None and following.pass_index == located.pass_index else None

    def _unknown(self, located: Located) -> bool:
        key = located.pass_index, located.chunk
        return not (key in self._begun or key in self.claims)

    def _begin_claims(self, slot: int, first: Located, terms: ClaimTerms) -> None:
        """Begins to claim this chunk, and those behind it that will be wanted soon, unless they are known."""
        wanted = CLAIM_SECONDS * self.pace.pace / max(1, len(self.shards.slots()))
        group: list[Located] = []
        located: Located | None = first
        batches = 0
        while located is not None and len(group) < CLAIM_CHUNKS and (located is first or batches < wanted):
            if self._unknown(located):
                group.append(located)
            batches += int(self.plan.batches[located.chunk])
            located = self._following(slot, located)
        if group:
            future = self._background.submit(functools.partial(self._make_claims, slot, group, terms))
            self._begun |= {(one.pass_index, one.chunk): (slot, future) for one in group}

    def _make_claims(self, slot: int, group: list[Located], terms: ClaimTerms) -> None:
        """Claims the chunks. Raises WorkChanged if the slot is lost."""
        assert self.records is not None
        self.claims |= {claim.key: claim for claim in self.records.claim(slot, group, terms)}

    def _join(self, key: ChunkKey) -> None:
        """Returns when this claim, and those that are made together with it, are made."""
        _, future = self._begun[key]
        self._begun = {k: begun for k, begun in self._begun.items() if begun[1] is not future}
        future.result()

    def _await_claims(self, slot: int) -> None:
        """Returns when no claim is being made for the slot."""
        while mine := [key for key, (holder, _) in self._begun.items() if holder == slot]:
            with contextlib.suppress(WorkChanged):
                self._join(mine[0])

    def _with_progress(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        lowest = self.shards.lowest()
        for claim in claims:
            claim.progress = min(max(0, lowest - claim.first_step), claim.batches)
        return claims

    def _leave_completing(self, claims: list[Claim]) -> None:
        if self.records is not None and claims:
            self._background.run(functools.partial(self.records.complete, claims))
        for claim in claims:
            del self.claims[claim.key]
