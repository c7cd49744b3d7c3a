"""An async trainer: computes batches of the chunks that it claims; every shard applies each of them when it comes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphft.errors import GraphftError
from graphft.ops.context import ChunkWork, EndOfPass, NoData, WorkChanged
from graphft.runtime.data import CHANGED
from graphft.runtime.etcd import LeaseLost, Store
from graphft.runtime.execute.determinism import SETTINGS_CHANGED
from graphft.runtime.process.work_record import Phase
from graphft.runtime.queue.async_queue import AsyncQueue
from graphft.runtime.roles.trainer.async_comm import AsyncComm
from graphft.runtime.roles.trainer.storage_wait import AWAY
from graphft.runtime.roles.trainer.trainer import IDLE_SECONDS, Trainer

if TYPE_CHECKING:
    from graphft.transpiler import Job

NOT_OF_THE_CHUNK = (CHANGED, SETTINGS_CHANGED, AWAY)
"""Rules of errors that say nothing against the chunk that was read."""


class ChunkTrainer(Trainer):
    """An async trainer's process. `ctx.step` counts the batches that it has computed."""

    comm: AsyncComm

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, etcd, index)
        self.comm = AsyncComm(self)
        self.queue = AsyncQueue(self, self.program.find_op("etcd_get_chunk"), self.comm, self)
        self.ctx.comm, self.ctx.queue, self.ctx.claims = self.comm, self.queue, self.queue
        self._work: ChunkWork | None = None
        self._places: dict[int, dict[int, int]] = {}

    @property
    def stops(self) -> bool:
        """Whether this trainer is to end, or to give its work away, and hence waits for nothing that may take long."""
        return self.leaving or self.view.over or self.bar.sidelined()

    @property
    def interrupted(self) -> bool:
        return self.stops

    # -- the loop -----------------------------------------------------------------------------------------------

    def work(self) -> None:
        self._work = None
        if self.bar.sidelined():
            self.queue.release_all()
            self.comm.pump(IDLE_SECONDS)
            return
        try:
            loss = self.compute()
            self._note(loss)
        except EndOfPass:
            self.pass_index = self.queue.next_pass()
            self.run_block("pass")
        except NoData:
            self.comm.pump(IDLE_SECONDS)
        except WorkChanged:
            pass
        except LeaseLost:
            raise
        except Exception as error:
            self._report(error)
            raise
        finally:
            self.work_record.mark(Phase.IDLE)

    def leave(self) -> None:
        self.queue.release_all()

    def report_hung(self, what: str) -> None:
        """A batch that is never done is one that cannot be computed: its failures are counted in the same way."""
        super().report_hung(what)
        work = self.prefetcher.reading or self._work
        if work is not None:
            self.queue.report_failure((work.pass_index, work.chunk), what)

    def _report(self, error: Exception) -> None:
        work = self._work
        if work is not None and not (isinstance(error, GraphftError) and error.rule in NOT_OF_THE_CHUNK):
            text = self.tell_failure(
                f"batch {work.batch} of chunk {work.chunk} in pass {work.pass_index}",
                error,
                chunk=work.chunk,
                pass_index=work.pass_index,
            )
            self.queue.report_failure((work.pass_index, work.chunk), text)

    # -- data and metrics ---------------------------------------------------------------------------------------

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[torch.Tensor]:
        self._work = work
        self.begin(work)
        return super().batch(work, columns)

    def begin(self, work: ChunkWork) -> None:
        """The sends that follow are of this batch."""
        self.comm.begin((work.pass_index, work.chunk), work.batch)

    def _note(self, loss: Any) -> None:
        work = self._work
        assert work is not None
        self.ctx.step += 1
        if work.pass_index not in self._places:
            self._places = {work.pass_index: {c.chunk: c.first_step for c in self.plan.chunks_of(work.pass_index)}}
        self.record(self._places[work.pass_index][work.chunk] + work.batch, 0, work.samples, loss)
