"""A trainer: computes gradients. Stateless: what evolves lives on the pservers, so it may die at any time.

What sync and async trainers share: data, metrics, status, leaving. Their loops are in slot_trainer and chunk_trainer.
"""

from __future__ import annotations

import functools
import math
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from graphft import registry
from graphft.errors import describe
from graphft.ops.context import ChunkWork
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.records import TrainerStatus
from graphft.runtime.data import BatchKey, Prefetcher, Reader, open_reader
from graphft.runtime.data.forks import forks_are_told_to_end
from graphft.runtime.etcd import LeaseLost, Store, TransientEtcdError
from graphft.runtime.execute.input_checks import check_dims
from graphft.runtime.process.work_record import Phase, Place, WorkRecord, record_path
from graphft.runtime.protocol.sync_events import ShardDown, ShardUp, TrainerControl
from graphft.runtime.roles.limits import trainer_limits
from graphft.runtime.roles.role import Role
from graphft.runtime.roles.trainer.bar import Bar
from graphft.runtime.roles.trainer.loading import Loading
from graphft.runtime.roles.trainer.metrics import Metrics
from graphft.runtime.roles.trainer.scope import trainer_scope
from graphft.runtime.roles.trainer.step_proof import prove_step
from graphft.runtime.roles.trainer.storage_wait import StorageWait, open_when_there
from graphft.runtime.transport import make_client

if TYPE_CHECKING:
    from graphft.runtime.roles.trainer.comm import Comm
    from graphft.transpiler import Job

IDLE_SECONDS = 0.25
CAREFUL_STEPS = 16
"""So many steps a trainer does not read ahead when the one before it has died at work."""
OF_THE_CHUNK = frozenset({"op-failed", "read", "feed", "data"})
"""Rules of errors that reading or computing a batch gives: failures of its chunk."""
RATE_WINDOW = 50


class Trainer(Role):
    """A trainer's process. The main thread computes and owns the protocol's state; the daemon thread watches etcd.

    Subclasses set the ports `ctx.comm` and `ctx.queue`, and have the loop.
    """

    kind = "trainer"
    comm: Comm

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        self.counters: Counter[str] = Counter()
        self.control: deque[TrainerControl] = deque()
        """Events that the daemon thread found, for the main thread to take in."""
        self._known = JobView()
        self._addresses: dict[str, str] = {}
        self._watching = threading.Lock()
        super().__init__(job, job_dir, job.trainer_program(), etcd, index)
        self.transport = make_client(self.id, f"trainer {index}", trainer_limits(self.program), self.login)
        self.plan = self.config.plan
        self.leaving = False
        self.work_record = WorkRecord(record_path(self.job_dir, index))
        self._careful = CAREFUL_STEPS * self.work_record.unfinished
        self.bar = Bar(self)
        reader = self._open_data()
        self.storage = StorageWait(self, reader)
        self.prefetcher = Prefetcher(reader, 2 * self.config.trainers + 4, self._note_ahead)
        self.ctx.data = self
        self.pass_index = -1
        self.batch_samples = 0
        """Samples of the batch that was read last."""
        self.samples = 0
        self.loss: float | None = None
        self._times: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._metrics = Metrics(self.job_dir / "metrics" / f"trainer-{self.id}.jsonl")
        self.ctx.scope.update(trainer_scope(self.program))
        self.open_session()

    def _open_data(self) -> Reader:
        """Makes the reader, which takes as long as the Dataset's construction does: without a lease so far."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._leave())
        forks_are_told_to_end()
        self.work_record.mark(Phase.LOADING)
        with Loading(
            self.etcd, self.keys, self.job_dir, (self.kind, self.id), "data", lambda: self.view, self._leaves_now
        ):
            make = functools.partial(
                open_reader,
                self.config.data,
                self.job_dir,
                self.config.seed,
                cached_chunks=max(8, self.config.trainers + 1),
            )
            reader = make() if self.config.data.kind == "arrays" else open_when_there(make)
        self.work_record.mark(Phase.IDLE)
        return reader

    def _leaves_now(self) -> bool:
        """Whether this process is to end while it loads: it holds nothing that it would have to give back."""
        if self.leaving:
            self.work_record.mark(Phase.LEFT)
        return self.leaving

    def run(self) -> None:
        """From start until the job is complete, or SIGTERM asks this trainer to leave."""
        self.start_daemon()
        try:
            prove_step(self)
            self.run_block("init")
            self.watch()
            self.progress.begin("computing")
            while not self.leaving and not self.over():
                self.work()
            self.leave()
        except (LeaseLost, TransientEtcdError):
            self.before_end()
            raise
        finally:
            self.prefetcher.close()
            self._metrics.close()
            self.close()
            self.transport.close()
        if self.leaving:
            self.work_record.mark(Phase.LEFT)

    def before_end(self) -> None:
        if self.work_record.phase != Phase.PROVING:
            self.work_record.mark(Phase.IDLE)
        self.work_record.ahead(None)

    @property
    def claim_timeout(self) -> float:
        """Seconds within which a claim must be renewed; infinite if nothing is claimed."""
        op = self.program.find_op("etcd_get_chunk")
        return float(registry.attr(op, "timeout")) if op is not None else math.inf

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While this trainer waits for others: its death then tells nothing of its batch."""
        before = self.work_record.mark(Phase.IDLE)
        try:
            yield
        finally:
            self.work_record.mark(before)

    def work(self) -> None:
        """Computes the next batch; without one, waits a moment."""
        raise NotImplementedError

    def leave(self) -> None:
        """Gives back what this trainer holds. The job is over, or this trainer was asked to go."""

    def _leave(self) -> None:
        """On a signal, which may have interrupted code that holds the transport's lock: it takes none itself."""
        self.leaving = True

    def wake(self) -> None:
        transport = getattr(self, "transport", None)  # the watch may call before the constructor is through
        if transport is not None:
            transport.wake()

    @property
    def interrupted(self) -> bool:
        """Whether the work at hand is to be left: this trainer is to go, the job is over, or the work has changed."""
        raise NotImplementedError

    def compute(self) -> Any:
        """Runs block step, and returns the loss."""
        (loss,) = self.run_block("step", fetch=(str(self.program.attrs["loss"]),))
        return loss

    def tell_failure(self, what: str, error: Exception, **fields: Any) -> str:
        """Puts an error of the user's step into the job's events; returns it as text."""
        text = describe(error.__cause__ or error)
        self.events.emit(
            "step-failed", f"{what} failed: {text}", traceback="".join(traceback.format_exception(error)), **fields
        )
        return text

    # -- data ---------------------------------------------------------------------------------------------------

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[torch.Tensor]:
        self.batch_samples = work.samples
        counted = self.counted(work)
        place = Place(counted.pass_index, counted.chunk, counted.batch)
        self.work_record.begin(Phase.READING, place, counted.claim)
        batch = self.storage.batch(BatchKey(work.pass_index, work.chunk, work.batch, self.config.batch_size))
        if "assume" in self.program.attrs:
            check_dims(self.program, {c: batch[c] for c in columns})
        self.work_record.begin(Phase.COMPUTING, place, counted.claim)
        return [batch[c] for c in columns]

    def counted(self, work: ChunkWork) -> ChunkWork:
        """The work as the queue counts it, to which this batch belongs."""
        return work

    def read_ahead(self, pass_index: int, chunk: int, batch: int) -> None:
        """Begins to make a batch that will be wanted. Not after a process that died at work: then it is known what
        this one is at, should it die, too."""
        if not self._careful:
            self.prefetcher.schedule(BatchKey(pass_index, chunk, batch, self.config.batch_size))

    def _note_ahead(self, key: BatchKey | None) -> None:
        self.work_record.ahead(Place(*key[:3]) if key is not None else None)

    @property
    def pace(self) -> float:
        """Batches per second of late; 0 at the beginning."""
        times = self._times
        return (len(times) - 1) / (times[-1][0] - times[0][0]) if len(times) > 1 else 0.0

    def alive_since(self, then: float) -> bool:
        """Whether the main thread has computed a batch, or waited for shards that answer, since then."""
        computed = bool(self._times) and self._times[-1][0] > then
        return computed or (self.comm.pumped > then and not self.storage.waiting and not self.comm.silent())

    # -- what is watched ----------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Turns what changed in etcd into events of the protocol, for the main thread to take in."""
        with self._watching:  # the main thread calls this too: views must be taken in in order
            view = self.view
            if not self.ready(view):
                return
            before, self._known = self._known, view
            self._addresses = {record.id: record.address for record in view.pservers.values()} | self._addresses
            self.control.extend(self.changes(before, view))
        self.wake()
        if threading.current_thread() is self._daemon:
            self.bar.update()

    def ready(self, view: JobView) -> bool:
        """Whether the job has begun, so that its events mean something."""
        return True

    def changes(self, before: JobView, after: JobView) -> list[TrainerControl]:
        """The protocol's events that lead from one view to the next."""
        events: list[TrainerControl] = []
        for shard in sorted(before.pservers.keys() | after.pservers.keys()):
            was, now = before.pservers.get(shard), after.pservers.get(shard)
            if was is not None and (now is None or now.id != was.id):
                events.append(ShardDown(shard))
            if now is not None and (was is None or now.id != was.id):
                events.append(ShardUp(shard, now.id))
        return events

    def view_address(self, up: ShardUp) -> str:
        """Where a shard that came up can be reached."""
        return self._addresses[up.incarnation]

    # -- what is reported ---------------------------------------------------------------------------------------

    def record(self, step: int, slot: int, samples: int, loss: Any) -> None:
        """Notes a computed batch: for status, and for the job's metrics."""
        self.loss, self.samples = float(loss), self.samples + samples
        self._careful = max(0, self._careful - 1)
        self._times.append((time.monotonic(), samples))
        row = {"step": step, "slot": slot, "loss": self.loss, "samples": samples, "at": round(time.time(), 4)}
        self._metrics.write(row)

    @property
    def at_step(self) -> int | None:
        return self.ctx.step if self.pass_index >= 0 else None

    def story(self) -> list[str]:
        return self.comm.machine.story.of() if self.comm.machine is not None else []

    def status(self) -> msgspec.Struct:
        times = list(self._times)
        rate = sum(n for _, n in times[1:]) / (times[-1][0] - times[0][0]) if len(times) > 1 else 0.0
        return TrainerStatus(
            self.ctx.step,
            max(self.pass_index, 0),
            self.loss,
            self.samples,
            rate,
            self.skipped,
            {**self.counters, **self.transport.counters},
            self.storage.waiting,
            list(self.bar.silent),
        )

    @property
    def skipped(self) -> int:
        """Batches that a shard did not answer in time, so far (async)."""
        return self.counters["skipped"]
