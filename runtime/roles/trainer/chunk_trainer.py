"""Async trainers: they compute batches of the chunks that they claim; every shard applies each of them when it comes.

With local accumulation a trainer computes several batches of a chunk, a unit, between two pushes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.ir import Kind, registry
from graphft.ops.context import ChunkWork, CommPort, EndOfPass, LocalPort, NoData, OnNonfinite, Slices, WorkChanged
from graphft.runtime.etcd import LeaseLost, Store
from graphft.runtime.process.work_record import Phase
from graphft.runtime.protocol.async_trainer import AsyncTrainer
from graphft.runtime.protocol.events import BeginBatch, ChunkKey, CloseBatch, Loaded, TrainerOptions
from graphft.runtime.queue.async_queue import AsyncQueue, Ledgers, StaticAssignment, batches_of
from graphft.runtime.queue.chunk_queue import OpenQueue
from graphft.runtime.queue.coordinator_queue import CoordinatorOpenQueue
from graphft.runtime.queue.etcd_queue import EtcdOpenQueue
from graphft.runtime.roles.programs import buckets_of, learning_rates_of, push_timeout_of
from graphft.runtime.roles.trainer.batches import Batches
from graphft.runtime.roles.trainer.shard_link import POLL_SECONDS, ShardLink
from graphft.runtime.roles.trainer.state import KnownShards
from graphft.runtime.roles.trainer.trainer import IDLE_SECONDS, Trainer, bad_records, blames_batch
from graphft.runtime.roles.trainer.view import Quarantine, TrainerView

if TYPE_CHECKING:
    from graphft.transpiler.job import Job


@dataclass(eq=False, repr=False)
class AsyncComm(ShardLink, CommPort, Ledgers):
    """The CommPort of an async trainer, and its queue's view of the shards' ledgers."""

    quarantine: Quarantine

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answer_seconds = push_timeout_of(self.program)
        me, buckets = self.member, buckets_of(self.program, self.member.config.pservers)
        options = TrainerOptions(me.id, buckets, run=me.job.run_id, retry_interval=1.0)
        self.machine = AsyncTrainer(options)
        self.shards.machine = self.machine

    @property
    def interrupted(self) -> bool:
        """True if this trainer is to end, or to give its work away, and hence waits for nothing that may take long."""
        return self.state.leaving or self.member.view.over or self.quarantine.sidelined()

    def begin(self, work: ChunkWork) -> None:
        """Begins the contribution of this batch, or unit."""
        self.begin_contribution()
        self.do(BeginBatch((work.pass_index, work.chunk), work.batch))

    # -- Ledgers ------------------------------------------------------------------------------------------------

    def await_ledgers(self, key: ChunkKey) -> None:
        """Waits until the shards have answered what they have of a chunk; not longer than for any other answer."""
        end = time.monotonic() + self._answer_seconds
        self.take_in(0)
        while not self.machine.known(key) and time.monotonic() < end:
            if self.interrupted:
                raise NoData
            self.pump(POLL_SECONDS)

    # -- CommPort -----------------------------------------------------------------------------------------------

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        self.take_in(0)
        while not self.machine.has(shard, bucket):
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)
        frame = self.machine.frame(shard, bucket)
        if frame is not None:
            self.load(shard, bucket, frame, tensors, slices)
            self.do(Loaded(shard, bucket, refresh))

    def end_pull(self, shards: int) -> None:
        while self.machine.answered() < shards:
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        if self.machine.lacks(shard):
            self.send(shard, bucket, tensors, slices, check)  # if it takes no data, the barrier gives it its time
        elif check:  # it has the batch, but whether that is finite concerns the others
            values = torch.cat([t.reshape(-1)[a:b] for t, (a, b) in zip(tensors, slices, strict=True)])
            self.check.look_at_bucket(shard, bucket, values, tensors)

    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None:
        self.hand_over(wait=True)
        work = self.state.work
        assert work is not None
        what = f"batch {work.batch} of chunk {work.chunk} in pass {work.pass_index}"
        finite = self.decide(on_nonfinite, what)
        self.do(CloseBatch(push_timeout, max_skipped, finite, self.reported()))
        end = time.monotonic() + push_timeout
        while self.machine.settled() < shards:
            if self.interrupted and time.monotonic() > end:
                raise WorkChanged
            self.pump(POLL_SECONDS)


class ChunkTrainer(Trainer):
    """An async trainer's process. `ctx.step` counts the batches that it has computed."""

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, etcd, index)
        member, state, ctx = self.member, self.state, self.ctx
        self.shards = KnownShards(push_timeout_of(self.program))
        self.quarantine = Quarantine(member, self.shards, self.claim_timeout)
        self.view = ctx.view = TrainerView(member, state, self.quarantine)
        self.comm = ctx.comm = self.make_link(AsyncComm, quarantine=self.quarantine)
        self.data = ctx.data = Batches(self.comm, self.prefetcher, self.reader)
        self.data.begin = self.comm.begin
        self.queue = AsyncQueue(member, self._make_records(), self.comm, state, self.data.read_ahead)
        ctx.queue = ctx.claims = self.queue
        self.end.watched[self.member.progress] = self._report_hung

    def _make_records(self) -> OpenQueue:
        """Returns the queue's records, as the program's operators have it."""
        generations = self.comm.machine.generations
        if self.program.find_op("get_task") is not None:
            records = CoordinatorOpenQueue(self.member, self.make_task_client(), self.state, generations)
            self.closing.callback(records.close)
            return records
        if self.program.find_op("etcd_get_chunk") is not None:
            return EtcdOpenQueue(self.member, self.state, generations)
        return StaticAssignment(self.member)

    def work(self) -> None:
        self.state.work = None
        if self.quarantine.sidelined():
            self.queue.release_all()
            self.comm.pump(IDLE_SECONDS)
            return
        try:
            self._work_on()
        except NoData:
            self.comm.pump(IDLE_SECONDS)
        except WorkChanged:
            pass
        except LeaseLost:
            raise
        except Exception as error:
            if not self._report(error):
                raise
        finally:
            self.work_record.end()

    def _work_on(self) -> None:
        """Computes a batch, or begins the next pass, which may have to be waited for, too."""
        try:
            self.compute()
            self.ctx.step += 1
        except EndOfPass:
            self.state.pass_index = self.queue.next_pass()
            self.blocks.run("pass")

    def _report(self, error: Exception) -> bool:
        """Returns True if this trainer goes on: records that no trainer can read are discarded."""
        work = self.state.work
        if work is None or not blames_batch(error):
            return False
        key = work.pass_index, work.chunk
        text = self.tell_failure(
            f"batch {work.batch} of chunk {work.chunk} in pass {work.pass_index}",
            error,
            chunk=work.chunk,
            pass_index=work.pass_index,
        )
        records, certain = bad_records(error)
        report = functools.partial(self.queue.report_failure, key, text, records=records, certain=certain)
        known = self.count_failure(self.queue, report)
        self.queue.drop(key)
        if known and certain:
            return True
        self.work_record.mark(Phase.REPORTED)
        return False

    def _report_hung(self, what: str) -> None:
        """Counts a batch that is never done as one that cannot be computed."""
        reading, work = self.prefetcher.reader.reading, self.state.work
        if reading is not None:  # perhaps read ahead, of a chunk that is not begun
            batch = reading.batch_index // self.data.count
            what = self.hung_reading(what, reading)
            self.queue.report_failure((reading.pass_index, reading.chunk), what, batch)
        elif work is not None:
            self.queue.report_failure((work.pass_index, work.chunk), what)

    def leave(self) -> None:
        self.queue.release_all()


class UnitTrainer(ChunkTrainer, LocalPort):
    """Modes half_async and geo_sgd. The queue, the shards' ledgers and the metrics know units only: the plan is one of
    units. A unit is pushed when its last batch is computed, so a trainer that dies in it has pushed nothing of it."""

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, etcd, index)
        op = self.program.find_op("local_steps")
        assert op is not None
        self.data.begin, self.data.count = id, registry.attr(op, "count")  # a batch is read for its unit
        self.ctx.local = self
        self._rates: dict[str, float] = {}
        """The learning rates of the last batch, where trainers have the optimizers."""
        self._batch: ChunkWork | None = None
        self._batches = self.config.epochs * sum(
            self.config.data.batches(self.config.batch_size, self.config.drop_last)
        )

    def compute(self) -> None:
        super().compute()
        if not self.check.finite:
            # The unit was discarded, but mode geo_sgd's own optimizer has seen it: its state may not be finite. It
            # begins as in a trainer that is started again.
            for v in self.program.of_kind(Kind.STATE):
                self.ctx.scope[v.name].copy_(self.program.values[v.name])

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        config, names = self.config, learning_rates_of(self.program)
        self.comm.begin(unit)
        self.state.unit = unit
        rates: tuple[Any, ...] = ()
        # A version is a unit, and the last ones of chunks are shorter: batches that were applied, on average.
        done = self.comm.machine.newest() * self._batches // config.plan.total_steps
        order, size = config.plan.order(unit.pass_index, unit.chunk), config.batch_size
        works = batches_of(unit, count=count, batch_size=size, seed=config.seed, order=order, number=done)
        for work, following in zip(works, [*works[1:], None], strict=True):
            if work is not works[0] and self.comm.interrupted:
                raise WorkChanged  # nothing of the unit was pushed: the next holder of the chunk computes it
            self._batch = work
            if following is not None:
                self.data.schedule(following)
            rates = self.blocks.run(block, names)
            self.comm.pump(0)  # a long unit is no sign of death
        self._rates = dict(zip(names, map(float, rates), strict=True))
        self.state.work, self.state.batch_samples = unit, unit.samples

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        if self._batch is None or unit != self.state.unit:
            raise GraphftError(
                "block local runs outside of its unit",
                rule="local-block",
                help="let local_steps run it, with the chunk that the step got",
            )
        return self._batch

    def learning_rates(self) -> dict[str, float]:
        return self._rates
