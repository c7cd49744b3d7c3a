"""A trainer: computes gradients. Stateless: what evolves lives on the pservers, so it may die at any time."""

from __future__ import annotations

import functools
import json
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from graphft.errors import GraphftError
from graphft.ir import Kind
from graphft.ops.context import ChunkWork, NoData, WorkChanged
from graphft.runtime.data import BatchKey, Prefetcher, open_reader
from graphft.runtime.etcd import Etcd, LeaseLost, absent, delete_op, put_op, value_is
from graphft.runtime.protocol.slots import Assignment, assign
from graphft.runtime.protocol.sync_events import Rollback, ShardDown, ShardUp, SlotGained, SlotLost, Work
from graphft.runtime.queue_sync import PlanQueue
from graphft.runtime.roles.base import Role, log
from graphft.runtime.roles.comm_sync import SyncComm
from graphft.runtime.status import TrainerStatus
from graphft.runtime.transport import ZmqClient
from graphft.runtime.view import JobView

if TYPE_CHECKING:
    from graphft.transpiler import Job

IDLE_SECONDS = 0.25
RATE_WINDOW = 50


class Trainer(Role):
    """A trainer's process. The main thread computes and owns the protocol's state; the daemon thread watches etcd."""

    kind = "trainer"

    def __init__(self, job: Job, job_dir: Path, etcd: Etcd, index: int) -> None:
        self.counters: Counter[str] = Counter()
        self.control: deque[Any] = deque()
        self._known = JobView()
        self._addresses: dict[str, str] = {}
        self._assignment = Assignment()
        self._claiming = threading.Lock()
        super().__init__(job, job_dir, job.trainer_program(), etcd, index)
        self.transport = ZmqClient(self.id)
        self.plan = self.config.plan
        self.comm = SyncComm(self)
        self.queue = PlanQueue(self)
        self.prefetcher = Prefetcher(open_reader(self.config.data, self.job_dir, self.config.seed),
                                     depth=2 * self.config.trainers + 4)
        self.ctx.comm, self.ctx.queue, self.ctx.data = self.comm, self.queue, self
        self.pass_index = -1
        self.samples = 0
        self.loss: float | None = None
        self._times: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._leaving = False
        self._make_scope()

    def _make_scope(self) -> None:
        """Constants as saved; what pservers own, empty until it is received."""
        for v in self.program.variables.values():
            if v.name in self.program.values:
                self.ctx.scope[v.name] = self.program.values[v.name].clone()
            elif v.kind in (Kind.PARAM, Kind.BUFFER):
                self.ctx.scope[v.name] = torch.empty([int(d) for d in v.shape], dtype=getattr(torch, v.dtype))

    def run(self) -> None:
        """From start until the job is complete, or SIGTERM asks this trainer to leave."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._leave())
        self.start_daemon()
        try:
            self.run_block("init")
            self.watch()
            self._loop()
        finally:
            self.prefetcher.close()
            self.close()
            self.transport.close()

    def _leave(self) -> None:
        self._leaving = True
        self.wake()

    def wake(self) -> None:
        transport = getattr(self, "transport", None)  # the watch may call before the constructor is through
        if transport is not None:
            transport.wake()

    # -- the loop -----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._leaving:
            view = self.view
            if view.state == "failed":
                raise GraphftError(f"job {self.keys.job} failed", rule="job-failed", help="see its events")
            if view.over:
                return
            work = self.comm.begin()
            if work is None:
                if self.comm.finished:
                    self.queue.complete_job()
                self.comm.pump(IDLE_SECONDS)
            else:
                self._step(work)

    def _step(self, work: Work) -> None:
        self.ctx.step, self.ctx.slot = work.step, work.slot
        try:
            if (pass_index := self.plan.pass_of(work.step)) != self.pass_index:
                self.pass_index = pass_index
                self.run_block("pass")
            self._read_ahead(work)
            (loss,) = self.run_block("step", fetch=(str(self.program.attrs["loss"]),))
            self._record(work, loss)
        except NoData:
            if self.comm.await_ready():
                self.queue.complete_chunks()
                self.lowered(self.program.blocks["step"], start=self._barrier)(self.ctx, self.ctx.scope)
        except WorkChanged:
            pass
        except LeaseLost:
            raise
        except Exception as error:
            self._report_failure(work, error)
            raise

    @property
    def _barrier(self) -> int:
        """Where block step goes on when a slot has no data: an empty contribution is a barrier without sends."""
        return next(i for i, op in enumerate(self.program.blocks["step"].ops) if op.type == "send_barrier")

    def _report_failure(self, work: Work, error: Exception) -> None:
        cause = error.__cause__ or error
        text = "".join(traceback.format_exception_only(type(cause), cause)).strip()
        self.events.emit("step-failed", f"step {work.step} of slot {work.slot} failed: {text}", step=work.step,
                         slot=work.slot, traceback="".join(traceback.format_exception(error))[-4000:])
        self.queue.report_failure(work, text)

    # -- data ---------------------------------------------------------------------------------------------------

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[torch.Tensor]:
        batch = self.prefetcher.get(BatchKey(work.pass_index, work.chunk, work.batch, self.config.batch_size))
        return [batch[c] for c in columns]

    def busy_since(self, then: float) -> bool:
        """Whether a step was computed after this time of the monotonic clock."""
        return bool(self._times) and self._times[-1][0] > then

    def view_address(self, up: ShardUp) -> str:
        """Where a shard that came up can be reached."""
        return self._addresses[up.incarnation]

    def _read_ahead(self, work: Work) -> None:
        """Schedules what comes next: this trainer's other slots at this step, and all of them at the next."""
        slots = self.comm.slots()
        ahead = [(work.step + (v <= work.slot), v) for v in slots] + [(work.step, work.slot)]
        for step, slot in ahead:
            located = self.plan.locate(step, slot)
            if located is not None:
                self.prefetcher.schedule(BatchKey(located.pass_index, located.chunk, located.batch,
                                                  self.config.batch_size))

    # -- what is watched ----------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Turns what changed in etcd into events of the protocol, for the main thread to take in."""
        with self._claiming:  # the main thread calls this too: views must be taken in in order
            view = self.view
            if view.epoch is None:
                return  # the first pserver makes it; nothing can be done before
            before, self._known = self._known, view
            self._addresses = {record.id: record.address for record in view.pservers.values()} | self._addresses
            self.control.extend(_changes(before, view, self.id))
        self.wake()

    def claim_slots(self, slots: int, policy: str) -> None:
        view = self.view
        if view.over or self.comm.finished:
            return  # whoever leaves now was through with its slots
        self._assignment = assign(slots=slots, live=view.trainers, holders=view.slots, me=self.id, policy=policy)
        for slot in self._assignment.claim:
            key = self.keys.slot(slot)
            if self.etcd.txn([absent(key)], [put_op(key, self.id.encode(), self.lease)], token=key).ok:
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
                self.queue.release(slot)
                self.patiently(functools.partial(self._free, self.keys.slot(slot)))
                self.control.append(SlotLost(slot))
                log.info("handed slot %d over (%s)", slot, assignment.reason)

    def _free(self, key: str) -> None:
        self.etcd.txn([value_is(key, self.id.encode())], [delete_op(key)])

    # -- what is reported ---------------------------------------------------------------------------------------

    def _record(self, work: Work, loss: Any) -> None:
        located = self.plan.locate(work.step, work.slot)
        samples = located.samples if located is not None else 0
        self.loss, self.samples = float(loss), self.samples + samples
        self._times.append((time.monotonic(), samples))
        path = self.job_dir / "metrics" / f"trainer-{self.id}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"step": work.step, "slot": work.slot, "loss": self.loss, "samples": samples}) + "\n")

    def status(self) -> msgspec.Struct:
        times = list(self._times)
        rate = sum(n for _, n in times[1:]) / (times[-1][0] - times[0][0]) if len(times) > 1 else 0.0
        return TrainerStatus(self.ctx.step, max(self.pass_index, 0), self.loss, self.samples, rate, 0)


def _changes(before: JobView, after: JobView, me: str) -> list[Any]:
    """The protocol's events that lead from one view to the next."""
    events: list[Any] = []
    old, new = before.epoch, after.epoch
    if new is not None and new.generation > (old.generation if old is not None else -1):
        events.append(Rollback(new.generation, new.step))
    for shard in sorted(before.pservers.keys() | after.pservers.keys()):
        was, now = before.pservers.get(shard), after.pservers.get(shard)
        if was is not None and (now is None or now.id != was.id):
            events.append(ShardDown(shard))
        if now is not None and (was is None or now.id != was.id):
            events.append(ShardUp(shard, now.id))
    mine_before = {v for v, holder in before.slots.items() if holder == me}
    mine = {v for v, holder in after.slots.items() if holder == me}
    lost, gained = sorted(mine_before - mine), sorted(mine - mine_before)
    return [*events, *map(SlotLost, lost), *map(SlotGained, gained)]
