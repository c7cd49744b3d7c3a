"""Runs a job's programs in this process, by the shards of `graphft replay`: without protocol, transport and etcd.

Nothing fails and nobody is late here: what it shows is what the programs compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from graphft.ops.context import ChunkWork, Context, LocalPort
from graphft.plan import Located, batch_seed
from graphft.runtime.process.progress import Progress
from graphft.runtime.queue.async_queue import batches_of
from graphft.runtime.replay.command import LocalComm, LocalShards, Pushed
from graphft.runtime.roles.programs import trainer_scope
from graphft.runtime.roles.role import Blocks
from graphft.runtime.roles.trainer.step_check import TrialBatch
from graphft.transpiler.job import Job
from graphft.transpiler.layout import assemble

Batches = Callable[[ChunkWork], Mapping[str, Tensor]]


class Trainer(TrialBatch, LocalPort):
    """Computes one (step, slot) at a time: `located`, None if the slot has no data; what it pushes is in `pushed`."""

    def __init__(self, job: Job, shards: LocalShards, batches: Batches) -> None:
        self.job, self.shards, self.batches = job, shards, batches
        program = job.trainer_program()
        self.ctx = Context(trainer_scope(program), queue=self, data=self, slots=self, local=self)
        self.blocks = Blocks(program, self.ctx, Progress())
        self.located: Located | None = None
        self.pushed: Pushed = {}
        self.finite = True

    def compute(self, step: int, slot: int) -> None:
        self.located = found = self.job.config.plan.locate(step, slot)
        if found is not None:
            seed = batch_seed(self.job.config.seed, step, slot)
            self.work = ChunkWork(found.pass_index, found.chunk, found.batch, found.samples, seed)
            self.ctx.step, self.ctx.slot, self.ctx.comm = step, slot, (comm := LocalComm(self.job, self.shards))
            self.blocks.run("step")
            self.pushed, self.finite = comm.pushed, comm.finite

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[Tensor]:
        found = self.batches(work)
        return [found[name] for name in columns]

    def run_unit(self, unit: ChunkWork, block: str, count: int) -> None:
        config = self.job.config
        batches = config.epochs * sum(config.data.batches(config.batch_size, config.drop_last))
        done = self.ctx.step * batches // config.total_steps
        order = config.plan.order(unit.pass_index, unit.chunk)
        options = {"count": count, "batch_size": config.batch_size, "seed": config.seed}
        for self.current in batches_of(unit, order=order, number=done, **options):
            self.blocks.run(block)

    def local_batch(self, unit: ChunkWork) -> ChunkWork:
        return self.current


class InProcess:
    """All roles of a job. `run` trains it to its end; `model()` is the model then, `skipped` has the steps that were
    left out."""

    def __init__(self, job: Job, batches: Batches) -> None:
        self.job, self.shards = job, LocalShards(job)
        self.trainer = Trainer(job, self.shards, batches)
        self.skipped: list[int] = []

    def run(self, steps: int | None = None) -> None:
        for step in range(self.job.config.total_steps if steps is None else steps):
            self.run_step(step)

    def run_step(self, step: int) -> None:
        config, finite = self.job.config, True
        contributions: dict[int, tuple[int, Pushed]] = {}
        for slot in range(config.trainers if config.sync else 1):
            self.trainer.compute(step, slot)
            if self.trainer.located is not None:
                contributions[slot] = self.trainer.located.samples, self.trainer.pushed
                finite = finite and self.trainer.finite
        if finite or config.on_nonfinite != "skip":
            self.shards.apply(contributions)
        else:
            self.shards.leave_out()
            self.skipped.append(step)

    def model(self) -> dict[str, Tensor]:
        return assemble(self.job.trainer_program(), [shard.scope for shard in self.shards.shards])
