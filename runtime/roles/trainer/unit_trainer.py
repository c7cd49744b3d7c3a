"""An async trainer that accumulates locally: it computes several batches of a chunk, a unit, between two pushes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphft.ir import Kind, registry
from graphft.runtime.etcd import Store
from graphft.runtime.roles.trainer.batches import Batches
from graphft.runtime.roles.trainer.chunk_trainer import ChunkTrainer
from graphft.runtime.roles.trainer.units import Units

if TYPE_CHECKING:
    from graphft.transpiler import Job


class UnitTrainer(ChunkTrainer):
    """Modes half_async and geo_sgd. The queue, the shards' ledgers and the metrics know units only: the plan is one of
    units."""

    def __init__(self, job: Job, job_dir: Path, etcd: Store, index: int) -> None:
        super().__init__(job, job_dir, etcd, index)
        self.units = self.ctx.local = Units(self.member, self.blocks, self.state, self.comm, self.data)

    def make_data(self) -> Batches:
        """The DataPort: a batch is read for its unit, which `Units` begins."""
        op = self.program.find_op("local_steps")
        assert op is not None
        return Batches(
            self.program,
            self.config.batch_size,
            self.state,
            self.work_record,
            self.prefetcher,
            self.storage,
            self.check,
            count=registry.attr(op, "count"),
        )

    def compute(self) -> None:
        super().compute()
        if not self.check.finite:
            self._begin_state_anew()

    def learning_rates(self) -> dict[str, float]:
        return self.units.learning_rates

    def _begin_state_anew(self) -> None:
        """The unit was left out, but mode geo_sgd's own optimizer has seen it: what its state holds may not be finite.
        It begins as in a trainer that is started again."""
        for v in self.program.of_kind(Kind.STATE):
            self.ctx.scope[v.name].copy_(self.program.values[v.name])
