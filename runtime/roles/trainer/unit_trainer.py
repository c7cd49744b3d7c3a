"""An async trainer that accumulates locally: it computes several batches of a chunk, a unit, between two pushes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft import registry
from graphft.errors import GraphftError
from graphft.ops.context import ChunkWork, WorkChanged
from graphft.runtime.etcd import Store
from graphft.runtime.queue.units import batches_of
from graphft.runtime.roles.trainer.chunk_trainer import ChunkTrainer

if TYPE_CHECKING:
    from graphft.transpiler import Job


class UnitTrainer(ChunkTrainer):
    """Modes half_async and geo_sgd. The queue, the shards' ledgers and the metrics know units only: the plan is one of
    units. A unit is pushed when its last batch is computed, so a trainer that dies in it has pushed nothing of it."""

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, etcd, index)
        self.ctx.local = self
        self._unit: ChunkWork | None = None
        self._batch: ChunkWork | None = None
        self._unit_loss = 0.0
        op = self.program.find_op("local_steps")
        assert op is not None
        self._count: int = registry.attr(op, "count")
        batches = self.config.data.batches(self.config.batch_size, self.config.drop_last)
        self._batches = self.config.passes * sum(batches)

    def compute(self) -> Any:
        """Runs block step, which runs block local; returns the mean loss of the unit's samples."""
        self.blocks.run("step")
        return self._unit_loss

    # -- LocalPort ----------------------------------------------------------------------------------------------

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        super().begin(unit)
        self._unit = unit
        works = batches_of(
            unit, count=count, batch_size=self.config.batch_size, seed=self.config.seed, number=self._done()
        )
        fetch, losses = (str(self.program.attrs["loss"]),), 0.0
        for work, following in zip(works, [*works[1:], None], strict=True):
            if work is not works[0] and self.stops:
                raise WorkChanged  # nothing of the unit was pushed: the next holder of the chunk computes it
            self._batch = work
            if following is not None:
                super().read_ahead(unit.pass_index, unit.chunk, following.batch)
            (loss,) = self.blocks.run(block, fetch)
            losses += float(loss) * work.samples
            self.comm.pump(0)  # a long unit is no sign of death
        self._work, self.batch_samples, self._unit_loss = unit, unit.samples, losses / unit.samples

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        if self._batch is None or unit != self._unit:
            raise GraphftError(
                "block local runs outside of its unit",
                rule="local-block",
                help="let local_steps run it, with the chunk that the step got",
            )
        return self._batch

    def _done(self) -> int:
        """How many of the job's batches were applied to the parameters at hand. A version is a unit, the last ones of
        chunks being shorter: so many batches on average."""
        return self.comm.newest() * self._batches // self.plan.total_steps

    def counted(self, work: ChunkWork) -> ChunkWork:
        return self._unit or work

    # -- data ---------------------------------------------------------------------------------------------------

    def begin(self, work: ChunkWork) -> None:
        """Reading a batch begins nothing: the sends are of the unit."""

    def read_ahead(self, pass_index: int, chunk: int, unit: int) -> None:
        """The first batch of a unit; the others follow while it is computed."""
        super().read_ahead(pass_index, chunk, unit * self._count)
