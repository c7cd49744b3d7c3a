"""Units of local accumulation: several batches of a chunk that a trainer computes between two pushes."""

from __future__ import annotations

from typing import Any

from graphft.errors import GraphftError
from graphft.ops.context import ChunkWork, LocalPort, WorkChanged
from graphft.runtime.coordination.member import Member
from graphft.runtime.queue.async_queue import batches_of
from graphft.runtime.roles.blocks import Blocks
from graphft.runtime.roles.learning_rates import rate_names
from graphft.runtime.roles.trainer.async_comm import AsyncComm
from graphft.runtime.roles.trainer.batches import Batches
from graphft.runtime.roles.trainer.state import TrainerState


class Units(LocalPort):
    """The LocalPort of an async trainer. A unit is pushed when its last batch is computed, so a trainer that dies in it
    has pushed nothing of it.

    `learning_rates`: of its last batch, where trainers have the optimizers.
    """

    def __init__(self, member: Member, blocks: Blocks, state: TrainerState, comm: AsyncComm, data: Batches) -> None:
        self.config, self.blocks, self.state, self.comm, self.data = member.config, blocks, state, comm, data
        self.learning_rates: dict[str, float] = {}
        self._rates = rate_names(blocks.program)
        self._batch: ChunkWork | None = None
        batches = self.config.data.batches(self.config.batch_size, self.config.drop_last)
        self._batches = self.config.passes * sum(batches)

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        self.comm.begin(unit)
        self.state.unit = unit
        config = self.config
        rates: tuple[Any, ...] = ()
        works = batches_of(
            unit,
            count=count,
            batch_size=config.batch_size,
            seed=config.seed,
            order=config.plan.order(unit.pass_index, unit.chunk),
            number=self._done(),
        )
        for work, following in zip(works, [*works[1:], None], strict=True):
            if work is not works[0] and self.comm.interrupted:
                raise WorkChanged  # nothing of the unit was pushed: the next holder of the chunk computes it
            self._batch = work
            if following is not None:
                self.data.schedule(following)
            rates = self.blocks.run(block, self._rates)
            self.comm.pump(0)  # a long unit is no sign of death
        self.learning_rates = dict(zip(self._rates, map(float, rates), strict=True))
        self.state.work, self.state.batch_samples = unit, unit.samples

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        if self._batch is None or unit != self.state.unit:
            raise GraphftError(
                "block local runs outside of its unit",
                rule="local-block",
                help="let local_steps run it, with the chunk that the step got",
            )
        return self._batch

    def _done(self) -> int:
        """How many of the job's batches were applied to the parameters at hand. A version is a unit, the last ones of
        chunks being shorter: so many batches on average."""
        return self.comm.machine.newest() * self._batches // self.config.plan.total_steps
