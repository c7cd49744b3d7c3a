"""A sync trainer: contributes the gradients of the slots (logical trainers) that it holds, step by step."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from graphft.errors import GraphftError
from graphft.ir import registry
from graphft.ops.context import CommPort, Context, NoData, NotYet, OnNonfinite, Slices, SlotsPort, WorkChanged
from graphft.runtime.coordination.job_view import asked_steps, wanted_steps
from graphft.runtime.etcd import Store, absent, create_is, delete_op, put_op, value_is
from graphft.runtime.process.work_record import Phase
from graphft.runtime.protocol.events import Begin, Closed, Copied, Rollback, SlotLost, TrainerOptions, Work
from graphft.runtime.protocol.machine import Event
from graphft.runtime.protocol.slot_assignment import Assignment, assign
from graphft.runtime.protocol.sync_trainer import SyncTrainer
from graphft.runtime.queue.chunk_queue import SlotQueue
from graphft.runtime.queue.coordinator_queue import CoordinatorSlotQueue
from graphft.runtime.queue.etcd_queue import EtcdSlotQueue
from graphft.runtime.queue.sync_queue import SyncQueue
from graphft.runtime.roles.programs import buckets_of
from graphft.runtime.roles.trainer.batches import Batches
from graphft.runtime.roles.trainer.shard_link import POLL_SECONDS, ShardLink
from graphft.runtime.roles.trainer.state import SyncShards
from graphft.runtime.roles.trainer.trainer import IDLE_SECONDS, Trainer, bad_records, blames_batch
from graphft.runtime.roles.trainer.view import Quarantine, SyncTrainerView

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

log = logging.getLogger("graphft")

CHANGE_SECONDS = 5.0
"""For which a trainer that has lost a claim waits to hear why."""
LATE_SECONDS = 2.0
"""A view that does not know of a claim by then is of an etcd that was restored from a backup, and lost it."""


STALL_SECONDS = 5.0
"""After a wait without progress for this time the shards are met again: what was sent may have been lost."""
LOOK_SECONDS = 1.0
"""The longest wait that the time between two looks counts as: the main thread may have computed for longer, or have
been without the interpreter's lock."""


@dataclass(eq=False, repr=False)
class SyncComm(ShardLink, CommPort):
    """The CommPort of a sync trainer. `queue` hears of lost slots, and when the job goes back."""

    shards: SyncShards
    ctx: Context
    queue: SyncQueue

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lowest, self._waited, self._looked = 0, 0.0, time.monotonic()
        self._stall = STALL_SECONDS
        me, config = self.member, self.member.config
        buckets = buckets_of(self.program, config.pservers)
        self._options = TrainerOptions(me.id, buckets, config.total_steps, me.job.run_id)

    @property
    def interrupted(self) -> bool:
        return self.state.leaving or self.member.view.over or self.shards.work_changed

    def begin(self) -> Work | None:
        """Begins the next work, and returns it; None when there is nothing to do now."""
        self.take_in(0)
        if self.shards.machine is None:
            return None
        self.begin_contribution()
        self.do(Begin())
        return self.shards.machine.current

    def pump(self, seconds: float) -> None:
        super().pump(seconds)
        if self.shards.machine is not None:
            self._watch_progress(self.shards.machine)

    def await_shards(self, count: int) -> None:
        """Waits until `count` shards have reached the step. Raises WorkChanged."""
        machine = self._machine()
        while machine.reached() < count:
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)

    def _machine(self) -> SyncTrainer:
        assert self.shards.machine is not None
        return self.shards.machine

    def control(self, event: Event) -> None:
        shards = self.shards
        if isinstance(event, Rollback) and shards.machine is None:
            shards.machine = SyncTrainer(self._options, generation=event.generation)
            return
        if isinstance(event, Rollback):
            self.queue.rolled_back()
            log.info("generation %d: back to step %d", event.generation, event.step)
        if isinstance(event, SlotLost) and event.slot in shards.slots() and shards.claim_of(event.slot) <= event.claim:
            self.queue.lost(event.slot)
        if shards.machine is not None:  # the job's first generation comes before everything else
            self.do(event)

    def _watch_progress(self, machine: SyncTrainer) -> None:
        """After a stall, meets the slowest shards again: contributions that were lost are then made again."""
        lowest, now = machine.lowest(), time.monotonic()
        self._waited, self._looked = self._waited + min(now - self._looked, LOOK_SECONDS), now
        if lowest is None or not machine.slots or lowest != self._lowest:
            if lowest is not None:
                self._lowest, self._waited, self._stall = lowest, 0.0, STALL_SECONDS
            return
        paused = self.state.paused is not None and lowest >= self.ctx.step  # else a step of the pass before is not done
        if self._waited < self._stall or machine.finished or paused:
            return
        self._waited, self._stall = 0.0, min(2 * self._stall, 60.0)
        self.state.counters["stalls"] += 1
        log.debug("the story so far:\n%s", "\n".join(list(machine.story)[-40:]))
        for shard, connection in enumerate(machine.connections):
            if connection.introduced and connection.version == lowest:
                log.info("no progress at version %d; asking shard %d whether it has all of ours", lowest, shard)
                self.reconnect(shard)

    # -- CommPort -----------------------------------------------------------------------------------------------

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        machine = self._machine()
        while not machine.has(shard, bucket) or machine.work_changed:
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)
        frame = machine.frame(shard, bucket)
        if frame is not None:
            self.load(shard, bucket, frame, tensors, slices)
            self.do(Copied(shard, bucket, self.ctx.step, refresh))

    def end_pull(self, shards: int) -> None:
        self.await_shards(shards)

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        if not self.send(shard, bucket, tensors, slices, check):
            raise WorkChanged  # once the shard is met again, the step is done again

    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None:
        self.hand_over(wait=True)
        if not self.check.finite and self._machine().work_changed:
            raise WorkChanged  # it may be of a history that is over, and is not to be acted upon
        work, what = self.state.work, f"step {self.ctx.step}, slot {self.ctx.slot}"
        if work is not None:
            what += f" (batch {work.batch} of chunk {work.chunk} in pass {work.pass_index})"
        finite = self.decide(on_nonfinite, what)
        self.do(Closed(shards, finite, self.reported()))


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
        self.comm = ctx.comm = self.make_link(SyncComm, ctx=ctx, queue=self.queue)
        self.data = ctx.data = Batches(self.comm, self.prefetcher, self.reader)
        self._assignment = Assignment()
        self._claimed_at, self._claims_again_at = 0, 0.0
        ctx.slots = self
        self.end.watched[self.member.progress] = self._report_hung

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
        """Waits until this trainer is in the generation that begins with a batch discarded. That of the protocol's
        machine: the daemon's view may be ahead of it, and the same work would be begun again. `known`: etcd has
        discarded the batch. If not, the claim is somebody else's by now, or there are no claims: returns False if the
        work stays as it is all the same."""
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
