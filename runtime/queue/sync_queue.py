"""The chunk queue of sync training: etcd's record of how far each slot is in the pass plan.

Which chunk a slot works on follows from the plan, so claims never contend; the records (see `protocol.chunk_queue`)
say what is todo, pending and done, and count failures. A batch that fails too often is left out: the slot contributes
"empty" there. Later passes leave its records out of the batches that they are in then.

A step waits for none of it: the next chunks are claimed some steps before they are begun, as many as are worth about a
second, so that short ones do not keep etcd busy; and what is done is recorded later (`BackgroundTasks`). A step still
relies on its claim: it is made under the slot's key, and only its holder may leave a batch out; so when it was made
does not matter, as long as that was before the chunk's first batch.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

from graphft.ops.context import ChunkWork, ClaimsPort, Context, NoData, QueuePort, TasksPort, WorkChanged
from graphft.plan import Located, batch_seed
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.left_out import ChunkOmissions
from graphft.runtime.queue.background_tasks import BackgroundTasks
from graphft.runtime.queue.finished_passes import FinishedPasses
from graphft.runtime.queue.omissions import leave_out
from graphft.runtime.queue.pace import Pace
from graphft.runtime.queue.slot_records import Claim, EtcdRecords, Shards, SlotRecords
from graphft.runtime.queue.transactions import Terms, tell_left_out

if TYPE_CHECKING:
    from graphft.runtime.protocol.sync_events import Work

AHEAD = 8
"""A slot's next chunk is claimed so many steps before its first one (but in the second half of the chunk before)."""
CLAIM_SECONDS = 1.0
"""What is claimed at once is worth so much time, at the pace of late; ..."""
CLAIM_CHUNKS = 24
"""... but no more chunks: a transaction of etcd has at most 128 operations."""


class SyncQueue(QueuePort, ClaimsPort, TasksPort):
    """The QueuePort, ClaimsPort and TasksPort of a sync trainer.

    `records`: where claims are recorded; None: it only follows the plan. `ctx`: tells which (step, slot) is computed.
    """

    def __init__(self, member: Member, records: SlotRecords | None, ctx: Context, shards: Shards, pace: Pace) -> None:
        self.member, self.keys, self.plan = member, member.keys, member.config.plan
        self.records, self.ctx, self.shards, self.pace = records, ctx, shards, pace
        self.claims: dict[tuple[int, int], Claim] = {}
        """By pass and chunk. A slot's next chunk is claimed before the last batch of the one before is applied."""
        self._begun: dict[tuple[int, int], tuple[int, Future[None]]] = {}
        """Claims that are being made: by pass and chunk, the slot and the end of it."""
        self._background = BackgroundTasks("queue")
        self._left_out: dict[int, ChunkOmissions] = {}
        """By chunk. What is known of it in this generation: only a new one adds to it."""
        self._finished = FinishedPasses(member, shards.lowest, self._background)
        self.failing: Callable[[], bool] | None = None
        """Reports the batch that has just failed; whether that was `counted`."""
        self.counted = False

    # -- QueuePort ----------------------------------------------------------------------------------------------

    def claim_chunk(self, timeout: float, max_failures: int, max_discarded: int) -> ChunkWork:
        self._etcd.terms = Terms(timeout, max_failures, max_discarded)
        return self.get_task()

    @property
    def _etcd(self) -> EtcdRecords:
        """The records, of a program that has the operators of the queue in etcd."""
        assert isinstance(self.records, EtcdRecords)
        return self.records

    def planned_chunk(self) -> ChunkWork:
        return self.work_of(self._located())

    def _located(self) -> Located:
        located = self.plan.locate(self.ctx.step, self.ctx.slot)
        if located is None:
            raise NoData
        return located

    def work_of(self, located: Located, claim: int = 0) -> ChunkWork:
        seed = batch_seed(self.member.config.seed, self.ctx.step, self.ctx.slot)
        work = ChunkWork(located.pass_index, located.chunk, located.batch, located.samples, seed, claim=claim)
        return leave_out(work, self._left_out.get(located.chunk))

    def complete_chunks(self) -> None:
        self.finish_tasks()

    def enqueue_pass(self) -> None:
        """Makes the pass's todo records, then `/<job>/pass`, which makes them count. One trainer at a time tries."""
        index = self.plan.pass_of(self.ctx.step)
        made = self._etcd.passes.enqueue(
            index,
            lambda now: now is None or now.pass_index != index,
            functools.partial(self._finished.close_before, index),
        )
        if made:
            self._finished.forget_before(index)

    def requeue_stale(self, timeout: float) -> None:
        self._etcd.tend(list(self.claims.values()), timeout)

    # -- TasksPort ----------------------------------------------------------------------------------------------

    def get_task(self) -> ChunkWork:
        slot, located = self.ctx.slot, self._located()
        revision = self._claim(slot, located)
        self._claim_ahead(slot, located)
        work = self.work_of(located, revision)
        if not work.samples:
            raise NoData
        return work

    def finish_tasks(self) -> None:
        """Chunks that were claimed together are completed together."""
        if self.records is None:
            return
        self._background.check()
        lowest, claims = self.shards.lowest(), list(self.claims.items())
        unfinished = {claim.revision for _, claim in claims if claim.last_step >= lowest}
        self._leave_completing([claim for _, claim in claims if claim.revision not in unfinished])

    def fail_task(self) -> None:
        report, self.failing = self.failing, None
        self.counted = report() if report is not None else False

    def renew_tasks(self, timeout: float) -> None:
        assert self.records is not None
        self.records.tend(list(self.claims.values()), timeout)

    def expects(self, located: Located) -> bool:
        """Whether a batch will be computed here, as far as known."""
        return self.records is None or (located.pass_index, located.chunk) in self.claims

    # -- for the trainer ----------------------------------------------------------------------------------------

    def release(self, slot: int) -> None:
        """Gives the slot's chunks back; its next holder goes on inside them. Those that are applied, it completes: the
        next holder goes on behind them."""
        self._await_claims(slot)
        self._complete_applied(slot)
        held = [claim for claim in list(self.claims.values()) if claim.slot == slot]
        if self.records is not None and held:
            self.records.release(held)
        for claim in held:
            del self.claims[claim.pass_index, claim.chunk]

    def rolled_back(self) -> None:
        """A new generation began: what is pending is what the plan says of its first step, and what is left out is what
        etcd says now."""
        for slot in {claim.slot for claim in list(self.claims.values())} | {slot for slot, _ in self._begun.values()}:
            self.release(slot)
        self._left_out.clear()

    def lost(self, slot: int) -> None:
        """The slot is somebody else's: what was claimed for it is theirs to claim, but for what is applied already."""
        self._await_claims(slot)
        self._complete_applied(slot)
        held = [claim for claim in list(self.claims.values()) if claim.slot == slot]
        if self.records is not None:
            self.records.forget(held)
        for claim in held:
            del self.claims[claim.pass_index, claim.chunk]

    def settle(self) -> None:
        """Returns when everything that is done is recorded."""
        self._background.wait()

    def close(self) -> None:
        self._background.close()

    def report_failure(self, work: Work, reason: str, records: Collection[int] = (), *, certain: bool = False) -> bool:
        """Counts a failure of the batch of (step, slot); after too many in a row it is left out.

        Then a new generation begins: a holder before may have sent the batch to some of the shards, so this step and
        what follows is done again, without it on all of them. `certain`: no trainer can read `records`, so one failure
        is too many. Returns whether etcd knows now.
        """
        located = self.plan.locate(work.step, work.slot)
        if located is None:
            return False
        return self.report_batch(located.pass_index, located.chunk, located.batch, reason, records, certain)

    def report_batch(
        self, pass_index: int, chunk: int, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> bool:
        """As `report_failure`, of a batch of a claimed chunk. `records`: positions of those to blame, if known."""
        claim = self.claims.get((pass_index, chunk))
        if claim is None or self.records is None:
            return False
        change = self.records.fail(claim, batch, reason, records, certain)
        if change is not None:
            tell_left_out(self.member.events, claim.pass_index, claim.chunk, change)
        return change is not None

    def forget_claims(self) -> None:
        """The last step is applied: what is claimed still, the first shard completes."""
        for slot in {slot for slot, _ in self._begun.values()}:
            self._await_claims(slot)
        self.claims.clear()

    # -- transactions -------------------------------------------------------------------------------------------

    def _claim(self, slot: int, located: Located) -> int:
        """The revision of the claim, new if there is none."""
        key = located.pass_index, located.chunk
        if key not in self.claims:
            self._begin_claims(slot, located)
        if key in self._begun:
            self._join(key)
        return self.claims[key].revision

    def _claim_ahead(self, slot: int, located: Located) -> None:
        """Begins to claim the chunks that follow this one in the pass, when it is time to."""
        batches = int(self.plan.batches[located.chunk])
        if located.batch >= batches - min(AHEAD, batches // 2):
            following = self._following(slot, located)
            if following is not None and self._unknown(following):
                self._begin_claims(slot, following)

    def _following(self, slot: int, located: Located) -> Located | None:
        """The slot's next chunk in the same pass: the next pass has no records yet."""
        following = self.plan.locate(located.chunk_start_step + int(self.plan.batches[located.chunk]), slot)
        return following if following is not None and following.pass_index == located.pass_index else None

    def _unknown(self, located: Located) -> bool:
        key = located.pass_index, located.chunk
        return not (key in self._begun or key in self.claims)

    def _begin_claims(self, slot: int, first: Located) -> None:
        """Begins to claim this chunk, if it is not known yet, and of those behind it what will be wanted soon."""
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
            future = self._background.submit(functools.partial(self._make_claims, slot, group))
            self._begun |= {(one.pass_index, one.chunk): (slot, future) for one in group}

    def _join(self, key: tuple[int, int]) -> None:
        """Returns when this claim is made, and with it those that are made together."""
        _, future = self._begun[key]
        self._begun = {k: begun for k, begun in self._begun.items() if begun[1] is not future}
        future.result()

    def _await_claims(self, slot: int) -> None:
        """Returns when no claim is being made for the slot."""
        while mine := [key for key, (holder, _) in self._begun.items() if holder == slot]:
            with contextlib.suppress(WorkChanged):
                self._join(mine[0])

    def _make_claims(self, slot: int, group: list[Located]) -> None:
        """Claims the chunks. Raises WorkChanged when the slot is not ours any more."""
        assert self.records is not None
        granted = self.records.claim(slot, group)
        self._left_out |= granted.left_out
        for located in group:
            revision = granted.revisions.get((located.pass_index, located.chunk))
            if revision is not None:
                self.claims[located.pass_index, located.chunk] = self._made(slot, located, revision)

    def _made(self, slot: int, located: Located, revision: int) -> Claim:
        last = located.chunk_start_step + int(self.plan.batches[located.chunk]) - 1
        return Claim(
            slot, located.chunk_start_step, last, located.pass_index, located.chunk, revision, time.monotonic()
        )

    def _complete_applied(self, slot: int) -> None:
        """Begins to complete this slot's chunks that every shard has applied."""
        lowest = self.shards.lowest()
        self._leave_completing(
            [claim for claim in list(self.claims.values()) if claim.slot == slot and claim.last_step < lowest]
        )

    def _leave_completing(self, claims: list[Claim]) -> None:
        if self.records is not None and claims:
            self._background.run(functools.partial(self.records.complete, claims))
        for claim in claims:
            del self.claims[claim.pass_index, claim.chunk]
