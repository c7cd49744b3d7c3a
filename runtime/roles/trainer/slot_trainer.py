"""A sync trainer: contributes the gradients of the slots (logical trainers) that it holds, step by step."""

from __future__ import annotations

import functools
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import GraphftError
from graphft.ir import registry
from graphft.ops.context import NoData, NotYet, WorkChanged
from graphft.runtime.etcd import Store
from graphft.runtime.process.work_record import Phase
from graphft.runtime.protocol.events import Work
from graphft.runtime.queue.chunk_queue import SlotQueue
from graphft.runtime.queue.coordinator_queue import CoordinatorSlotQueue
from graphft.runtime.queue.etcd_queue import EtcdSlotQueue
from graphft.runtime.queue.sync_queue import SyncQueue
from graphft.runtime.roles.trainer.bar import Bar
from graphft.runtime.roles.trainer.batches import Batches
from graphft.runtime.roles.trainer.known_shards import SyncShards
from graphft.runtime.roles.trainer.slot_claims import SlotClaims
from graphft.runtime.roles.trainer.storage_wait import StorageWait
from graphft.runtime.roles.trainer.sync_comm import SyncComm
from graphft.runtime.roles.trainer.trainer import IDLE_SECONDS, Trainer, bad_records, blames_batch
from graphft.runtime.roles.trainer.view import SyncTrainerView

if TYPE_CHECKING:
    from graphft.transpiler import Job

CHANGE_SECONDS = 5.0
"""For which a trainer that has lost a claim waits to hear why."""


class SlotTrainer(Trainer):
    """A sync trainer's process."""

    shards: SyncShards

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        claims = job.trainer_program().find_op("etcd_claim_slots") is not None
        super().__init__(job, job_dir, etcd, index)
        self._computing: Work | None = None
        """What block step computes now."""
        member, state, program, ctx = self.member, self.state, self.program, self.ctx
        self.shards = shards = SyncShards()
        self.bar = bar = Bar(member, shards, self.claim_timeout)
        self.view = view = SyncTrainerView(member, state, bar, claims)
        self.queue = queue = SyncQueue(member, self._make_records(shards), ctx, shards, state)
        link = (member, self.transport, state, self.work_record, shards, program, self.check)
        self.comm = comm = SyncComm(*link, ctx, queue)
        self.storage = StorageWait(member, state, comm, self.prefetcher, self.reader)
        self.data = Batches(
            program, self.config.batch_size, state, self.work_record, self.prefetcher, self.storage, self.check
        )
        self.slots = SlotClaims(member, state, shards, bar, queue, comm, self.storage, view)
        ctx.view, ctx.queue, ctx.claims, ctx.comm, ctx.data, ctx.slots = view, queue, queue, comm, self.data, self.slots
        self.end.on_hung.append(self._report_hung)

    def _make_records(self, shards: SyncShards) -> SlotQueue | None:
        """Returns who keeps the queue's records, as the program's operators have it."""
        if self.program.find_op("get_task") is not None:
            return CoordinatorSlotQueue(self.member, self.make_task_client(), shards, self.state)
        if self.program.find_op("etcd_get_chunk") is not None:
            return EtcdSlotQueue(self.member, shards, self.state)
        return None

    # -- the loop -----------------------------------------------------------------------------------------------

    def work(self) -> None:
        work = self.comm.begin()
        if work is None:
            if self.shards.finished:
                self.queue.forget_claims()
            if self.bar.sidelined():
                self.slots.release_slots()
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
            if not self._is_next(work):
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

    def _is_next(self, work: Work) -> bool:
        """Waits until all steps before this one are done; False: its work has changed meanwhile.

        A batch is read before its step's parameters are there. If it were blamed then, what is discarded would depend
        on which trainer is ahead: a record that fails in two passes is to be found in the first of them.
        """
        try:
            self.comm.await_shards(self.config.pservers)
        except WorkChanged:
            return False
        return True

    def _is_void(self, generation: int, known: bool) -> bool:
        """Waits until this trainer is in the generation that begins with a batch discarded.

        What counts is the generation that the protocol's machine is in: the daemon's view may be ahead of it, and the
        same work would be begun again. `known`: whether etcd has left the batch out. If not, the claim is somebody
        else's by now, or there are no claims: False if the work stays as it is all the same.
        """
        until = time.monotonic() + CHANGE_SECONDS
        while not (self.member.over() or self.state.leaving) and self.shards.generation == generation:
            if not known and (self.shards.work_changed or time.monotonic() > until):
                return self.shards.work_changed
            with suppress(WorkChanged):
                self.comm.pump(IDLE_SECONDS)
        return True

    def _contribute_nothing(self) -> None:
        """The slot has no data at this step: an empty contribution is a barrier without sends."""
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

    # -- the end ------------------------------------------------------------------------------------------------

    def _report_hung(self, what: str) -> None:
        """A batch that is never done is one that cannot be computed: its failures are counted in the same way."""
        reading = self.prefetcher.reading
        if reading is not None:  # perhaps read ahead: what is to be computed now waits for it
            self.queue.report_batch(
                reading.pass_index, reading.chunk, reading.batch_index, self.hung_reading(what, reading)
            )
        elif self._computing is not None:
            self.queue.report_failure(self._computing, what)

    def leave(self) -> None:
        view = self.member.view
        if not view.over:
            for slot in self.shards.slots():
                self.slots.hand_over(slot)
        self.queue.settle()

    def close(self) -> None:
        self.queue.close()
        super().close()
