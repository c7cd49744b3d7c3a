"""An async trainer: computes batches of the chunks that it claims; every shard applies each of them when it comes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.ops.context import EndOfPass, NoData, WorkChanged
from graphft.runtime.etcd import LeaseLost, Store
from graphft.runtime.process.work_record import Phase
from graphft.runtime.queue.async_queue import AsyncQueue, StaticAssignment
from graphft.runtime.queue.chunk_queue import OpenQueue
from graphft.runtime.queue.coordinator_queue import CoordinatorOpenQueue
from graphft.runtime.queue.etcd_queue import EtcdOpenQueue
from graphft.runtime.roles.trainer.async_comm import AsyncComm, push_timeout_of
from graphft.runtime.roles.trainer.bar import Bar
from graphft.runtime.roles.trainer.batches import Batches
from graphft.runtime.roles.trainer.known_shards import KnownShards
from graphft.runtime.roles.trainer.storage_wait import StorageWait
from graphft.runtime.roles.trainer.trainer import IDLE_SECONDS, Trainer, bad_records, blames_batch
from graphft.runtime.roles.trainer.view import TrainerView

if TYPE_CHECKING:
    from graphft.transpiler import Job


class ChunkTrainer(Trainer):
    """An async trainer's process. `ctx.step` counts the batches that it has computed."""

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, etcd, index)
        member, state, program, ctx = self.member, self.state, self.program, self.ctx
        self.shards = shards = KnownShards(push_timeout_of(program))
        self.bar = bar = Bar(member, shards, self.claim_timeout)
        self.view = TrainerView(member, state, bar)
        self.comm = comm = AsyncComm(member, self.transport, state, self.work_record, shards, program, self.check, bar)
        self.storage = StorageWait(member, state, comm, self.prefetcher, self.reader)
        self.data = self.make_data()
        self.queue = AsyncQueue(member, self._make_records(), comm, state, self.data.read_ahead)
        ctx.view, ctx.comm, ctx.data, ctx.queue, ctx.claims = self.view, comm, self.data, self.queue, self.queue
        self.end.on_hung.append(self._report_hung)

    def _make_records(self) -> OpenQueue:
        """Returns who keeps the queue's records, as the program's operators have it."""
        if self.program.find_op("get_task") is not None:
            records = CoordinatorOpenQueue(self.member, self.make_task_client(), self.state, self.comm.generations)
            self._closing.append(records.close)
            return records
        if self.program.find_op("etcd_get_chunk") is not None:
            return EtcdOpenQueue(self.member, self.state, self.comm.generations)
        return StaticAssignment(self.member)

    def make_data(self) -> Batches:
        """The DataPort: each batch is pushed by itself."""
        return Batches(
            self.program,
            self.config.batch_size,
            self.state,
            self.work_record,
            self.prefetcher,
            self.storage,
            self.check,
            begin=self.comm.begin,
        )

    # -- the loop -----------------------------------------------------------------------------------------------

    def work(self) -> None:
        self.state.work = None
        if self.bar.sidelined():
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
        """A batch; or the next pass begins, which may have to be waited for, too."""
        try:
            self.compute()
            self.ctx.step += 1
        except EndOfPass:
            self.state.pass_index = self.queue.next_pass()
            self.blocks.run("pass")

    def _report(self, error: Exception) -> bool:
        """Returns whether that is all: records that no trainer can read are discarded, and this one goes on."""
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

    # -- the end ------------------------------------------------------------------------------------------------

    def _report_hung(self, what: str) -> None:
        """A batch that is never done is one that cannot be computed: its failures are counted in the same way."""
        reading, work = self.prefetcher.reading, self.state.work
        if reading is not None:  # perhaps read ahead, of a chunk that is not begun
            batch = reading.batch_index // self.data.count
            what = self.hung_reading(what, reading)
            self.queue.report_failure((reading.pass_index, reading.chunk), what, batch)
        elif work is not None:
            self.queue.report_failure((work.pass_index, work.chunk), what)

    def leave(self) -> None:
        self.queue.release_all()
