"""All shards of a sync job in this process: their blocks and buffers, without protocol, transport and etcd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphft.ir import Program, registry
from graphft.ops.context import Context
from graphft.runtime.process.progress import Progress
from graphft.runtime.protocol.round import Contribution
from graphft.runtime.roles.blocks import Blocks
from graphft.runtime.roles.pserver.norms import lay_out
from graphft.runtime.roles.pserver.shard_buffers import ShardBuffers
from graphft.runtime.transport.buffers import byte_view
from graphft.transpiler.layout import ALL_NORMS

if TYPE_CHECKING:
    from graphft.transpiler import Job

Pushed = Mapping[tuple[int, int], Tensor]
"""By shard and bucket, what a slot contributes."""


class LocalShard:
    """One pserver's program on its values."""

    def __init__(self, program: Program, device: str) -> None:
        self.scope: dict[str, Any] = {name: value.detach().clone() for name, value in program.values.items()}
        self.blocks = Blocks(program, Context(scope=self.scope, device=device), Progress())
        self.buffers = ShardBuffers(self.scope)
        for op in program.blocks["init"].ops:
            if op.type == "bucket":
                self.buffers.make_bucket(op.attrs["index"], op.reads, registry.attr(op, "reduce"))
        self.serve = next(op for op in program.blocks["serve"].ops if op.type == "listen_and_serv")
        reduce = program.blocks.get("reduce")
        self.partials = reduce.attrs["partials"].name if reduce is not None else ""
        self.order = reduce.attrs["order"] if reduce is not None else ()

    def block(self, attribute: str) -> None:
        """Runs the block that this attribute of `listen_and_serv` names, if there is one."""
        self.blocks.run(registry.attr(self.serve, attribute))


class LocalShards:
    """The job's state at a step: that of the initial values, until `restore`."""

    def __init__(self, job: Job) -> None:
        self.shards = [LocalShard(program, job.config.device) for program in job.programs.pservers]

    def restore(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        for shard, values in zip(self.shards, parts, strict=True):
            shard.buffers.restore(values)

    def bucket(self, shard: int, bucket: int) -> Tensor:
        """A bucket of parameters, or buffers, as it is now: flat."""
        return self.shards[shard].buffers.buckets[bucket].flat

    def apply(self, contributions: Mapping[int, tuple[int, Pushed]]) -> None:
        """A step. By slot, samples and what was pushed; in slot order, as a round has them."""
        if not contributions:
            return
        for index, shard in enumerate(self.shards):
            given = [
                Contribution(slot, samples, {b: byte_view(v) for (s, b), v in pushed.items() if s == index})
                for slot, (samples, pushed) in sorted(contributions.items())
            ]
            shard.buffers.reduce(given)
        self._exchange_norms()
        for shard in self.shards:
            shard.block("schedule_block")
            for block in registry.attr(shard.serve, "optimize_blocks"):
                shard.blocks.run(block)

    def leave_out(self) -> None:
        """A step of which a contribution is not finite, of a job that skips such steps."""
        for shard in self.shards:
            shard.block("schedule_block")
            shard.block("skip_block")

    def _exchange_norms(self) -> None:
        """Partial sums for clipping by global norm."""
        sums: dict[int, torch.Tensor] = {}
        for index, shard in enumerate(self.shards):
            if shard.partials:
                (sums[index],) = shard.blocks.run("reduce", fetch=(shard.partials,))
        for shard in self.shards:
            norms = lay_out(shard.order, sums)
            if norms is not None:
                shard.scope[ALL_NORMS] = norms
