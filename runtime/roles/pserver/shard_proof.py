"""What a shard proves itself with: its schedule, reduce and optimize blocks, once, on its initial values."""

from __future__ import annotations

from typing import Any

import torch

from graphft.ir import Kind, Operator
from graphft.ops.context import Context
from graphft.runtime.coordination.member import Member
from graphft.runtime.execute.lowering import Observe, lower
from graphft.runtime.roles.blocks import Blocks
from graphft.runtime.roles.proof import digest, prove, undisturbed
from graphft.runtime.roles.pserver.norms import lay_out
from graphft.runtime.roles.pserver.shard_buffers import Bucket, ShardBuffers
from graphft.transpiler.layout import ALL_NORMS


def prove_shard(member: Member, blocks: Blocks) -> None:
    """Compares what this shard's optimizer gives with what it gave in the shard's first process.

    Raises GraphftError[determinism].
    """
    if not member.view.over:
        with member.progress.within(member.progress.usual, "proving itself"):
            prove(member, member.keys.proof(f"pserver/{member.index}"), ShardTrial(member, blocks))


class ShardTrial:
    """One step of the optimizer, on gradients made from a seed, in a scope of its own."""

    what = "one step of the optimizer"

    def __init__(self, member: Member, blocks: Blocks) -> None:
        self.shard, self.config = member.index, member.config
        self.blocks, self.program = blocks, blocks.program

    def run(self, observe: Observe | None = None) -> tuple[dict[str, str], str]:
        program = self.program
        scope: dict[str, Any] = {name: value.detach().clone() for name, value in program.values.items()}
        inputs = {"initial values": digest(scope[name] for name in sorted(scope))}
        with undisturbed():
            self._optimize(scope, observe)
        names = sorted(v.name for v in program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE))
        return inputs, digest(scope[name] for name in names)

    def _optimize(self, scope: dict[str, Any], observe: Observe | None) -> None:
        ctx = Context(scope=scope, device=self.config.device)
        memory = self._memory(scope)
        memory.back_up(-1)
        serve = next(op.attrs for op in self.program.blocks["serve"].ops if op.type == "listen_and_serv")
        if serve.get("reduce_block"):
            self._reduce(serve["reduce_block"], ctx, observe)
        for block in filter(None, (serve.get("schedule_block", ""), *serve["optimize_blocks"])):
            self._run(block, ctx, observe)

    def _memory(self, scope: dict[str, Any]) -> ShardBuffers:
        memory = ShardBuffers(scope)
        for op in self.program.blocks["init"].ops:
            if op.type == "bucket":
                memory.make_bucket(op.attrs["index"], _names(op), op.attrs.get("reduce", "weighted_mean"))
        generator = torch.Generator().manual_seed(self.config.seed)
        for bucket in memory.buckets.values():
            _fill(bucket, generator)
        return memory

    def _reduce(self, name: str, ctx: Context, observe: Observe | None) -> None:
        """Partial sums of squares; those of the other shards count as zeros."""
        block = self.program.blocks[name]
        if "order" not in block.attrs:
            self._run(name, ctx, observe)
            return
        (sums,) = self._run(name, ctx, observe, fetch=(block.attrs["partials"].name,))
        norms = lay_out(block.attrs["order"], {self.shard: sums})
        if norms is not None:
            ctx.scope[ALL_NORMS] = norms

    def _run(self, name: str, ctx: Context, observe: Observe | None, fetch: tuple[str, ...] = ()) -> tuple[Any, ...]:
        block = self.program.blocks[name]
        if observe is None:
            return self.blocks.lowered(block, fetch)(ctx, ctx.scope)
        return lower(block, fetch=fetch, device=ctx.device, observe=observe)(ctx, ctx.scope)


def _names(op: Operator) -> list[str]:
    return [ref.name for ref in op.args]


def _fill(bucket: Bucket, generator: torch.Generator) -> None:
    """Gradients: multiples of 2^-16 up to 2^-6, which are made without any rounding. Integers stay as they are."""
    if bucket.flat.is_floating_point():
        whole = torch.randint(-1024, 1025, (bucket.flat.numel(),), generator=generator, dtype=torch.int16)
        bucket.total.copy_(whole.to(torch.float32) / 65536.0)
    else:
        bucket.total.copy_(bucket.flat)
