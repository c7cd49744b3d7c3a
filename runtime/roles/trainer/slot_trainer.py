"""A sync trainer: contributes the gradients of the slots (logical trainers) that it holds, step by step."""

from __future__ import annotations

import functools
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from graphft import registry
from graphft.errors import GraphftError, UsageError
from graphft.ops.context import NoData, WorkChanged
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.etcd import Store, absent, create_is, delete_op, put_op, value_is
from graphft.runtime.process.work_record import Phase
from graphft.runtime.protocol.slot_assignment import Assignment, assign
from graphft.runtime.protocol.sync_events import Rollback, SlotGained, SlotLost, TrainerControl, Work
from graphft.runtime.queue.sync_queue import SyncQueue
from graphft.runtime.roles.role import log
from graphft.runtime.roles.trainer.sync_comm import SyncComm
from graphft.runtime.roles.trainer.trainer import IDLE_SECONDS, OF_THE_CHUNK, Trainer

if TYPE_CHECKING:
    from graphft.transpiler import Job


class SlotTrainer(Trainer):
    """A sync trainer's process."""

    comm: SyncComm

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        self._assignment = Assignment()
        self._claimed_at = 0
        self._lost_at = float("-inf")
        """When a slot was lost last, by the clock of `progress`."""
        self._computing: Work | None = None
        """What block step computes now."""
        self._claims = job.trainer_program().find_op("etcd_claim_slots") is not None
        """Whether its program claims slots, or works on that of its index for good."""
        if not self._claims and not 0 <= index < job.config.trainers:
            raise UsageError(
                f"there is no trainer {index}: without fault tolerance each of the job's "
                f"{job.config.trainers} has an index",
                rule="role",
                help=f"give --index or GRAPHFT_INDEX: 0 to {job.config.trainers - 1}",
            )
        super().__init__(job, job_dir, etcd, index)
        self.comm = SyncComm(self)
        self.queue = SyncQueue(self, self.program.find_op("etcd_get_chunk"), self.ctx, self.comm, self)
        self.ctx.comm, self.ctx.queue, self.ctx.claims = self.comm, self.queue, self.queue

    # -- the loop -----------------------------------------------------------------------------------------------

    def work(self) -> None:
        work = self.comm.begin()
        if work is None:
            if self.comm.finished:
                self.queue.forget_claims()
            if self.bar.sidelined():
                self.release_slots()
            self.comm.pump(IDLE_SECONDS)
        else:
            self._step(work)

    def _step(self, work: Work) -> None:
        self.ctx.step, self.ctx.slot = work.step, work.slot
        self._computing = work
        try:
            if (pass_index := self.plan.pass_of(work.step)) != self.pass_index:
                self.pass_index = pass_index
                self.run_block("pass")
            self._read_ahead(work)
            located = self.plan.locate(work.step, work.slot)
            loss = self.compute()
            self.record(work.step, work.slot, located.samples if located is not None else 0, loss)
        except NoData:
            self._contribute_nothing()
        except WorkChanged:
            pass
        except GraphftError as error:
            if error.rule not in OF_THE_CHUNK:
                raise
            text = self.tell_failure(f"step {work.step} of slot {work.slot}", error, step=work.step, slot=work.slot)
            self.queue.report_failure(work, text)
            raise
        finally:
            self._computing = None
            self.work_record.mark(Phase.IDLE)

    def _contribute_nothing(self) -> None:
        """The slot has no data at this step: an empty contribution is a barrier without sends."""
        ops = self.program.blocks["step"].ops
        barrier = next(i for i, op in enumerate(ops) if op.type == "send_barrier")
        with suppress(WorkChanged):
            self.comm.await_shards(registry.attr(ops[barrier], "shards"))
            self.queue.complete_chunks()
            self.lowered(self.program.blocks["step"], start=barrier)(self.ctx, self.ctx.scope)

    def report_hung(self, what: str) -> None:
        """A batch that is never done is one that cannot be computed: its failures are counted in the same way."""
        super().report_hung(what)
        reading = self.prefetcher.reading
        if reading is not None:  # perhaps read ahead: what is to be computed now waits for it
            self.queue.report_batch(reading.pass_index, reading.chunk, reading.batch_index, what)
        elif self._computing is not None:
            self.queue.report_failure(self._computing, what)

    @property
    def interrupted(self) -> bool:
        return self.leaving or self.view.over or self.comm.machine is None or self.comm.machine.work_changed

    def _read_ahead(self, work: Work) -> None:
        """Schedules what comes next: this trainer's other slots at this step, and all of them at the next."""
        slots = self.comm.slots()
        ahead = [(work.step + (v <= work.slot), v) for v in slots] + [(work.step, work.slot)]
        for step, slot in ahead:
            located = self.plan.locate(step, slot)
            if located is not None and self.queue.expects(located):
                self.read_ahead(located.pass_index, located.chunk, located.batch)

    def leave(self) -> None:
        if not self.view.over:
            for slot in self.comm.slots():
                self._hand_over(slot)
        self.queue.settle()

    def close(self) -> None:
        self.queue.close()
        super().close()

    # -- slots --------------------------------------------------------------------------------------------------

    def ready(self, view: JobView) -> bool:
        return view.generation is not None  # the first pserver makes it; nothing can be done before

    def changes(self, before: JobView, after: JobView) -> list[TrainerControl]:
        old, new = before.generation, after.generation
        rollback = []
        if new is not None and new.number > (old.number if old is not None else -1):
            rollback.append(Rollback(new.number, new.step))
        # By claim, not by holder: a slot that was lost and claimed again between two looks begins anew.
        mine_before, mine = self._mine(before), self._mine(after)
        if not self._claims and before.generation is None:
            mine = {(self.index, 0)}  # for good: no process takes it over
        lost = [SlotLost(*slot) for slot in sorted(mine_before - mine)]
        if lost:
            self._lost_at = time.monotonic()
        gained = [SlotGained(*slot) for slot in sorted(mine - mine_before)]
        return [*rollback, *super().changes(before, after), *lost, *gained]

    def _mine(self, view: JobView) -> set[tuple[int, int]]:
        """Slots of this trainer's, each with the revision of its claim."""
        return {(v, view.claims[v]) for v, holder in view.slots.items() if holder == self.id}

    def claim_slots(self, slots: int, policy: str) -> None:
        view = self.view
        if view.over or self.leaving or self.comm.finished:
            return  # a trainer that leaves now was through with its slots
        if not self.storage.may_claim():
            return  # it could not compute them
        if self.watcher.revision < self._claimed_at:
            return  # the view does not know of the last claim yet, and would have this trainer claim too much
        self._assignment = assign(
            slots=slots, live=view.trainers, holders=view.slots, me=self.id, policy=policy, barred=self.bar.others(view)
        )
        if not (self.progress.fresh(self._lost_at) and self.comm.meets(view.pservers)):
            return  # what this trainer claimed now would wait, and all others with it
        for slot in self._assignment.claim:
            key = self.keys.slot(slot)
            result = self.etcd.txn([absent(key)], [put_op(key, self.id.encode(), self.lease)], token=key)
            if result.ok:
                self._claimed_at = result.revision
                self._tell_claimed(slot, view)
        if self._assignment.claim:
            self.watch()

    def _tell_claimed(self, slot: int, view: JobView) -> None:
        log.info("claimed slot %d (%s)", slot, self._assignment.reason)
        if self.comm.started:
            self.events.emit("takeover", f"trainer {self.index} took over slot {slot}", slot=slot, trainer=self.id)

    def release_slots(self) -> None:
        assignment, self._assignment = self._assignment, Assignment()
        for slot in assignment.release:
            if slot in self.comm.slots():
                self._hand_over(slot)
                log.info("handed slot %d over (%s)", slot, assignment.reason)

    def _hand_over(self, slot: int) -> None:
        """Gives the chunks and the slot back. It is lost here before it is free there: what the watch tells of it later
        may be that it was claimed again."""
        claim = self.comm.claim_of(slot)
        self.queue.release(slot)
        self.comm.control(SlotLost(slot, claim))
        self.retry_while_leased(functools.partial(self._free, self.keys.slot(slot), claim))

    def _free(self, key: str, claim: int) -> None:
        self.etcd.txn([create_is(key, claim), value_is(key, self.id.encode())], [delete_op(key)])
