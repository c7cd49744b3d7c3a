"""A trainer computes gradients. What evolves lives on the pservers, so it may die at any time.

Sync and async trainers share data, metrics, status, leaving; their loops are in slot_trainer and chunk_trainer.
"""

from __future__ import annotations

import functools
import logging
import math
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import registry
from graphft.ops.context import WorkChanged
from graphft.runtime.coordination.records import Failure, TrainerStatus
from graphft.runtime.coordination.run_record import tell_failed
from graphft.runtime.data import BadRecords, BatchKey, Prefetcher, Reader, open_reader, reset_signals_in_forks
from graphft.runtime.etcd import LeaseLost, Store, TransientEtcdError
from graphft.runtime.execute.accelerator import own_device
from graphft.runtime.process.progress import DATASETS
from graphft.runtime.process.work_record import Phase, Place, WorkRecord, record_path
from graphft.runtime.queue.task_client import TaskClient, waking
from graphft.runtime.queue.transactions import claims_chunks
from graphft.runtime.roles.programs import trainer_limits, trainer_scope
from graphft.runtime.roles.role import Role
from graphft.runtime.roles.trainer.batches import Loading, open_when_there
from graphft.runtime.roles.trainer.finite_check import FiniteCheck, NonFinite
from graphft.runtime.roles.trainer.shard_link import ShardLink
from graphft.runtime.roles.trainer.state import KnownShards, TrainerState
from graphft.runtime.roles.trainer.step_check import check_step
from graphft.runtime.roles.trainer.validator import Validator
from graphft.runtime.roles.trainer.view import Quarantine, TrainerView
from graphft.runtime.transport import ZmqClient
from graphft.transpiler.record import VALIDATION

if TYPE_CHECKING:
    from graphft.data import DataSpec
    from graphft.runtime.queue.async_queue import AsyncQueue
    from graphft.runtime.queue.sync_queue import SyncQueue
    from graphft.transpiler.job import Job

log = logging.getLogger("graphft")
L = TypeVar("L", bound=ShardLink)

IDLE_SECONDS = 0.25
CAREFUL_STEPS = 16
"""So many steps a trainer does not read ahead when the one before it has died at work."""
OF_THE_BATCH = frozenset({"op-failed", "read", "feed", "data"})
"""Rules of errors that reading or computing a batch gives."""


def blames_batch(error: Exception) -> bool:
    """True if an error of a step is one of its batch: user code's, or one of reading or computing it."""
    return not isinstance(error, GraphftError) or error.rule in OF_THE_BATCH


def bad_records(error: BaseException | None) -> tuple[frozenset[int], bool]:
    """Returns the positions in its chunk of the records that an error of a step is about, none if it does not say; and
    True if no trainer can read them."""
    while error is not None:
        if isinstance(error, BadRecords):
            return error.positions, error.certain
        error = error.__cause__
    return frozenset(), False


class Trainer(Role):
    """A trainer's process. The main thread computes and owns the protocol's state; the daemon thread watches etcd.
    Subclasses make the ports, and have the loop."""

    kind = "trainer"
    shards: KnownShards
    quarantine: Quarantine
    view: TrainerView

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        trainers = job.config.trainers
        if not claims_chunks(job.trainer_program()) and not 0 <= index < trainers:  # its work follows from its index
            raise UsageError(
                f"there is no trainer {index}: without fault tolerance each of the job's {trainers} has an index",
                rule="role",
                help=f"give --index or GRAPHFT_INDEX: 0 to {trainers - 1}",
            )
        super().__init__(job, job_dir, job.trainer_program(), etcd, index)
        self.state = TrainerState()
        self.closing = ExitStack()
        self.transport = ZmqClient(self.member.id, trainer_limits(self.program), self.member.login)
        self.closing.callback(self.transport.close)
        self.member.wake, self.member.leaving = self.transport.wake, lambda: self.state.leaving
        self.plan = self.config.plan
        self.work_record = WorkRecord(record_path(self.job_dir, index))
        before = self.work_record.before
        self.state.careful = CAREFUL_STEPS if before is not None and before.places else 0
        self.open_session()
        self.reader, held_out = self._open_data()
        for text in {one.differs for one in (self.reader, held_out) if one is not None} - {""} if index == 0 else ():
            self.member.events.emit("data-differs", text)
        self.prefetcher = Prefetcher(self.reader, 2 * self.config.trainers + 4, self._note_ahead)
        self.ctx.scope.update(trainer_scope(self.program, self.ctx.device))
        self.check = FiniteCheck(self.program, self.ctx.scope)
        self.end.before.append(self._blame_no_batch)
        self.validator = (
            Validator(self.member, self.job_dir, held_out, self.end, self.ctx.device) if held_out is not None else None
        )

    def device(self, index: int) -> str:
        return own_device(self.config.device, index)

    @property
    def claim_timeout(self) -> float:
        """Seconds for which claims hold without progress; for ever in a job without claims."""
        op = self.program.find_op("etcd_enqueue_timeout") or self.program.find_op("renew_tasks")
        return float(registry.attr(op, "timeout")) if op is not None else math.inf

    def make_task_client(self) -> TaskClient:
        """Returns a client of the coordinator, whose waits end when the main thread is woken."""
        client = TaskClient(self.member)
        self.member.wake = waking(self.transport, client)
        self.closing.callback(client.close)
        return client

    def count_failure(self, queue: SyncQueue | AsyncQueue, report: Callable[[], bool]) -> bool:
        """Returns True if a failure of a batch was counted. With a coordinator, block `failed` reports it."""
        if "failed" not in self.program.blocks:
            return report()
        queue.failing = report
        self.blocks.run("failed")
        return queue.counted

    def _open_data(self) -> tuple[Reader, Reader | None]:
        """Makes the readers of the training and the held-out data. That takes as long as the Datasets' construction
        does. It seeds the global generators: later it would disturb a step."""
        self.on_sigterm(self._leave)
        reset_signals_in_forks()
        self.work_record.mark(Phase.LOADING)
        validate, held_out = self.config.validate, None
        with Loading(self.member, self.end, "data", self._leaves_now):
            thread = ThreadPoolExecutor(1, thread_name_prefix=DATASETS)
            reader = self._open(self.config.data, self.job_dir, max(8, self.config.trainers + 1), thread)
            if validate is not None:
                held_out = self._open(validate.data, self.job_dir / VALIDATION, 2, thread)
        self.work_record.mark(Phase.IDLE)
        return reader, held_out

    def _open(self, spec: DataSpec, root: Path, cached_chunks: int, thread: ThreadPoolExecutor) -> Reader:
        make = functools.partial(open_reader, spec, root, self.config.seed, cached_chunks, thread)
        return make() if spec.kind == "arrays" else open_when_there(make, self._tell_of_wait)

    def _tell_of_wait(self, text: str) -> None:
        self.member.events.emit("storage-wait", f"trainer {self.member.index} is {text}")

    def _leaves_now(self) -> bool:
        """True if this process is to end while it loads."""
        if self.state.leaving:
            self.work_record.mark(Phase.LEFT)
        return self.state.leaving

    def _note_ahead(self, key: BatchKey | None) -> None:
        self.work_record.ahead(Place(*key[:3]) if key is not None else None)

    def make_link(self, kind: Callable[..., L], **more: Any) -> L:
        me, program, check = self.member, self.program, self.check
        return kind(me, self.transport, self.state, self.work_record, self.shards, program, check, **more)

    # -- from start to end --------------------------------------------------------------------------------------

    def run(self) -> None:
        """From start until the job is complete, or SIGTERM asks this trainer to leave."""
        self.start_daemon()
        try:
            self.check_start()
            with suppress(WorkChanged):  # it was asked to leave before it had begun
                self.blocks.run("init")
            self.view.take_in()
            self.member.progress.begin("computing")
            if self.validator is not None:
                self.end.watched[self.validator.progress] = self.validator.hung
                self.validator.start()
            while not self.state.leaving and not self.member.over():
                self.work()
            self.leave()
        except (LeaseLost, TransientEtcdError):
            self._blame_no_batch()
            raise
        except NonFinite as error:
            self._blame_no_batch()
            self._fail_job(error)
            raise
        finally:
            if self.validator is not None:
                self.validator.close()
            self.prefetcher.close()
            self.close()
            self.closing.close()
        if self.state.leaving:
            log.info("left: SIGTERM asked this trainer to")
            self.work_record.mark(Phase.LEFT)

    def check_start(self) -> None:
        check_step(self.member, self.blocks, self.work_record, self.prefetcher)

    def work(self) -> None:
        """Computes the next batch; without one, waits a moment."""
        raise NotImplementedError

    def leave(self) -> None:
        """Gives back what this trainer holds. The job is over, or this trainer was asked to go."""
        raise NotImplementedError

    def compute(self) -> None:
        """Runs block step, and counts the batch."""
        self.blocks.run("step")
        self.state.computed(self.state.batch_samples)

    def _leave(self) -> None:
        self.state.leaving = True

    def hung_reading(self, what: str, reading: BatchKey) -> str:
        """Says why this trainer ends, though its main thread was `what`: it waited for a batch that is never read."""
        return (
            f"trainer {self.member.index} made {what} or waiting for data: batch {reading.batch_index} of chunk "
            f"{reading.chunk} in pass {reading.pass_index} was being read"
        )

    def _blame_no_batch(self) -> None:
        """Notes that no batch is to blame: this process ends itself, and has said why."""
        if self.work_record.phase != Phase.PROVING:
            self.work_record.mark(Phase.IDLE)
        self.work_record.ahead(None)

    # -- what is reported ---------------------------------------------------------------------------------------

    def _fail_job(self, error: NonFinite) -> None:
        """Ends the job everywhere, with this error as its reason."""
        member, failure = self.member, Failure(error.message, error.help)
        member.retry_while_leased(lambda: tell_failed(member.etcd, member.keys, failure))
        member.events.emit("nonfinite", f"the job ends: {error.message}")

    def tell_failure(self, what: str, error: Exception, **fields: Any) -> str:
        """Emits an event of an error of the user's step; returns it as text."""
        cause = error.__cause__ or error
        text, trace = describe(cause), "".join(traceback.format_exception(cause))
        self.member.events.emit("step-failed", f"{what} failed: {text}", traceback=trace, **fields)
        return text

    @property
    def at_step(self) -> int | None:
        return self.ctx.step if self.state.pass_index >= 0 else None

    def story(self) -> list[str]:
        return list(self.shards.machine.story) if self.shards.machine is not None else []

    def learning_rates(self) -> dict[str, float]:
        """Returns those that it uses itself: none where pservers have the optimizers."""
        return {}

    def status(self) -> msgspec.Struct:
        state, paused = self.state, self.state.paused
        return TrainerStatus(
            step=self.ctx.step,
            pass_index=max(state.pass_index, 0),
            samples=state.samples,
            samples_per_second=state.rate,
            skipped=state.counters["skipped"],
            counters={**state.counters, **self.transport.counters},
            waiting=state.waiting or (f"waiting for {paused.what}" if paused is not None else ""),
            unreached=list(self.quarantine.silent),
            seconds=self.work_record.split.read(),
            paused=paused is not None,
            learning_rates=self.learning_rates(),
            validating=paused is not None and paused.validation,
        )
