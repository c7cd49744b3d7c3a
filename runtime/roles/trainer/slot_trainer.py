"""A sync trainer: contributes the gradients of the slots (logical trainers) that it holds, step by step."""

from __future__ import annotations

import functools
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import GraphftError
from graphft.ir import registry
from graphft.ops.context import NoData, NotYet, SlotsPort, WorkChanged
from graphft.runtime.coordination.job_view import asked_steps, wanted_steps
from graphft.runtime.etcd import Store, absent, create_is, delete_op, put_op, value_is
from graphft.runtime.process.work_record import Phase
from graphft.runtime.protocol.events import SlotLost, Work
from graphft.runtime.protocol.slot_assignment import Assignment, assign
from graphft.runtime.queue.chunk_queue import SlotQueue
from graphft.runtime.queue.coordinator_queue import CoordinatorSlotQueue
from graphft.runtime.queue.etcd_queue import EtcdSlotQueue
from graphft.runtime.queue.sync_queue import SyncQueue
from graphft.runtime.roles.trainer.state import SyncShards
from graphft.runtime.roles.trainer.sync_comm import SyncComm
from graphft.runtime.roles.trainer.trainer import IDLE_SECONDS, Trainer, bad_records, blames_batch
from graphft.runtime.roles.trainer.view import Quarantine, SyncTrainerView

if TYPE_CHECKING:
    from graphft.transpiler import Job

log = logging.getLogger("graphft")

CHANGE_SECONDS = 5.0
"""For which a trainer that has lost a claim waits to hear why."""
LATE_SECONDS = 2.0
"""A view that does not know of a claim by then is of an etcd that was restored from a backup, and lost it."""


class SlotTrainer(Trainer, SlotsPort):
    """A sync trainer's process."""

    shards: SyncShards

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, etcd, index)
        self._computing: Work | None = None
        """The work of block step now."""
        member, state, ctx = self.member, self.state, self.ctx
        self.shards = SyncShards()
        self.quarantine = Quarantine(member, self.shards, self.claim_timeout)
        claims = self.program.find_op("etcd_claim_slots") is not None
        self.view = ctx.view = SyncTrainerView(member, state, self.quarantine, claims)
        self.queue = SyncQueue(member, self._make_records(), ctx, self.shards, state)
        ctx.queue = ctx.claims = self.queue
        self.comm = ctx.comm = SyncComm(**self.link_parts(), ctx=ctx, queue=self.queue)
        self.data = ctx.data = self.make_data(self.comm)
        self._assignment = Assignment()
        self._claimed_at, self._claims_again_at = 0, 0.0
        ctx.slots = self
        self.end.on_hung.append(self._report_hung)

    def _make_records(self) -> SlotQueue | None:
        """Returns the queue's records, as the program's operators have it."""
        if self.program.find_op("get_task") is not None:
            return CoordinatorSlotQueue(self.member, self.make_task_client(), self.shards, self.state)
        if self.program.find_op("etcd_get_chunk") is not None:
            return EtcdSlotQueue(self.member, self.shards, self.state)
        return None

    def work(self) -> None:
        work = self.comm.begin()
        if work is None:
            if self.shards.finished:
                self.queue.forget_claims()
            if self.quarantine.sidelined():
                self.release_slots()
            self.comm.pump(IDLE_SECONDS)
        else:
            self._step(work)

    def _step(self, work: Work) -> None:
        self.ctx.step, self.ctx.slot = work.step, work.slot
        self._computing = work
        try:
            if (pass_index := self.plan.pass_of(work.step)) != self.state.pass_index:
                self.blocks.run("pass")
                self.state.pass_index = pass_index
            self.state.paused = None
            self._read_ahead(work)
            self.compute()
        except NoData:
            self._contribute_nothing()
        except NotYet as pause:
            self._computing, self.state.paused = None, pause.with_traceback(None)  # it is not at work: nothing is late
            with suppress(WorkChanged):
                self.comm.pump(IDLE_SECONDS)
        except WorkChanged:
            pass
        except GraphftError as error:
            if not blames_batch(error):
                raise
            # A batch is read before its step's parameters are there. If it were blamed then, the discarded one would
            # depend on which trainer is ahead: a record that fails in two passes is to be found in the first of them.
            try:
                self.comm.await_shards(self.config.pservers)
            except WorkChanged:
                return
            text = self.tell_failure(f"step {work.step} of slot {work.slot}", error, step=work.step, slot=work.slot)
            text, (records, certain) = f"{text}, at step {work.step}, slot {work.slot}", bad_records(error)
            generation = self.shards.generation
            report = functools.partial(self.queue.report_failure, work, text, records, certain=certain)
            known = self.count_failure(self.queue, report)
            if certain and self._is_void(generation, known):
                return
            self.work_record.mark(Phase.REPORTED)
            raise
        finally:
            self._computing = None
            self.work_record.end()

    def _is_void(self, generation: int, known: bool) -> bool:
        """Waits until this trainer is in the generation that begins with a batch discarded.

        That of the protocol's machine: the daemon's view may be ahead of it, and the same work would be begun again.
        `known`: etcd has discarded the batch. If not, the claim is somebody else's by now, or there are no claims:
        returns False if the work stays as it is all the same.
        """
        until = time.monotonic() + CHANGE_SECONDS
        while not (self.member.over() or self.state.leaving) and self.shards.generation == generation:
            if not known and (self.shards.work_changed or time.monotonic() > until):
                return self.shards.work_changed
            with suppress(WorkChanged):
                self.comm.pump(IDLE_SECONDS)
        return True

    def _contribute_nothing(self) -> None:
        """Contributes without data: a barrier without sends."""
        ops = self.program.blocks["step"].ops
        barrier = next(i for i, op in enumerate(ops) if op.type == "send_barrier")
        with suppress(WorkChanged):
            self.comm.await_shards(registry.attr(ops[barrier], "shards"))
            self.queue.complete()
            self.blocks.run("step", start=barrier)

    def _read_ahead(self, work: Work) -> None:
        """Schedules what comes next: this trainer's other slots at this step, and all of them at the next."""
        slots = self.shards.slots()
        ahead = [(work.step + (v <= work.slot), v) for v in slots] + [(work.step, work.slot)]
        for step, slot in ahead:
            located = self.plan.locate(step, slot)
            if located is not None and self.queue.expects(located):
                self.data.read_ahead(self.queue.work_of(located))

    def _report_hung(self, what: str) -> None:
        """Counts a batch that is never done as one that cannot be computed."""
        reading = self.prefetcher.reader.reading
        if reading is not None:  # perhaps read ahead: the next step waits for it
            what = self.hung_reading(what, reading)
            self.queue.report_batch(reading.pass_index, reading.chunk, reading.batch_index, what)
        elif self._computing is not None:
            self.queue.report_failure(self._computing, what)

    def leave(self) -> None:
        if not self.member.view.over:
            for slot in self.shards.slots():
                self.hand_over(slot)
        self.queue.settle()

    def close(self) -> None:
        self.queue.close()
        super().close()

    # -- SlotsPort: the daemon thread claims, the main thread hands over ------------------------------------------

    def await_pass(self) -> None:
        step, config, view = self.ctx.step, self.config, self.member.view
        if step >= asked_steps(config, view):
            raise NotYet("the next epoch to be asked for")
        if step >= wanted_steps(config, view):
            open_step = next(iter(view.validating), None)
            of = "a validation" if open_step is None else f"the validation of step {open_step}"
            raise NotYet(of, validation=True)

    def await_validation(self) -> None:
        if self.ctx.step in self.member.config.validated:
            self.await_pass()

    def claim_slots(self, slots: int, policy: str) -> None:
        member, view = self.member, self.member.view
        if view.over or self.state.leaving or self.shards.finished:
            return  # a trainer that leaves now was through with its slots
        if not self.data.may_claim():
            return  # it could not compute them
        if member.watcher.revision < self._claimed_at and time.monotonic() < self._claims_again_at:
            return  # the view does not know of the last claim yet, and would have this trainer claim too much
        self._assignment = assign(
            slots=slots,
            live=view.trainers,
            holders=view.slots,
            me=member.id,
            policy=policy,
            barred=self.quarantine.others(view),
        )
        if not (member.progress.fresh(self.state.lost_at) and self.shards.meets(view.pservers)):
            return  # its slots would wait, and all others with them
        for slot in self._assignment.claim:
            key = member.keys.slot(slot)
            result = member.etcd.txn([absent(key)], [put_op(key, member.id.encode(), member.lease)], token=key)
            if result.ok:
                self._claimed_at, self._claims_again_at = result.revision, time.monotonic() + LATE_SECONDS
                log.info("claimed slot %d (%s)", slot, self._assignment.reason)
                if self.ctx.step > 0:  # it has taken part in a step
                    text = f"trainer {member.index} took over slot {slot}"
                    member.events.emit("takeover", text, slot=slot, trainer=member.id)
        if self._assignment.claim:
            self.view.watch()

    def release_slots(self) -> None:
        assignment, self._assignment = self._assignment, Assignment()
        for slot in assignment.release:
            if slot in self.shards.slots():
                self.hand_over(slot)
                log.info("handed slot %d over (%s)", slot, assignment.reason)

    def hand_over(self, slot: int) -> None:
        """Gives the chunks and the slot back. It is lost here before it is free there: the watch may tell later that it
        was claimed again."""
        claim = self.shards.claim_of(slot)
        self.queue.release(slot)
        self.comm.control(SlotLost(slot, claim))
        member, key = self.member, self.member.keys.slot(slot)
        mine = [create_is(key, claim), value_is(key, member.id.encode())]
        member.retry_while_leased(lambda: member.etcd.txn(mine, [delete_op(key)]))
