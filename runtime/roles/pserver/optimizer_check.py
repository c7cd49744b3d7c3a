"""A shard's start check: its schedule, reduce and optimize blocks, once, on its initial values."""

from __future__ import annotations

from typing import Any

import torch

from graphft.ir import Kind
from graphft.ops.context import Context
from graphft.runtime.coordination.member import Member
from graphft.runtime.roles.blocks import Blocks
from graphft.runtime.roles.pserver.norms import lay_out
from graphft.runtime.roles.pserver.shard_buffers import Bucket, ShardBuffers
from graphft.runtime.roles.start_check import compare, digest, undisturbed
from graphft.transpiler.layout import ALL_NORMS


def check_optimizer(member: Member, blocks: Blocks) -> None:
    """Compares what this shard's optimizer gives with what it gave in the shard's first process.

    Raises GraphftError[determinism].
    """
    if member.view.over:
        return
    program = blocks.program
    with member.progress.within(member.progress.usual, "making its start check"):
        scope: dict[str, Any] = {name: value.detach().clone() for name, value in program.values.items()}
        inputs = {"initial values": digest(scope[name] for name in sorted(scope))}
        with undisturbed():
            _optimize(member, blocks, Context(scope=scope, device=member.config.device))
        names = sorted(v.name for v in program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE))
        result = digest(scope[name] for name in names)
        compare(member, member.keys.proof(f"pserver/{member.index}"), "one step of the optimizer", inputs, result)


def _optimize(member: Member, blocks: Blocks, ctx: Context) -> None:
    """Runs one step, on gradients made from a seed."""

    def run(name: str, fetch: tuple[str, ...] = ()) -> tuple[Any, ...]:
        return blocks.lowered(program.blocks[name], fetch)(ctx, ctx.scope)

    program, memory = blocks.program, ShardBuffers(ctx.scope)
    generator = torch.Generator().manual_seed(member.config.seed)
    for op in program.blocks["init"].ops:
        if op.type == "bucket":
            names = [ref.name for ref in op.args]
            memory.make_bucket(op.attrs["index"], names, op.attrs.get("reduce", "weighted_mean"))
            _fill(memory.buckets[op.attrs["index"]], generator)
    memory.back_up(-1)
    serve = next(op.attrs for op in program.blocks["serve"].ops if op.type == "listen_and_serv")
    reduce = serve.get("reduce_block", "")
    order = program.blocks[reduce].attrs.get("order") if reduce else None
    if order is not None:  # partial sums of squares; those of the other shards count as zeros
        (sums,) = run(reduce, fetch=(program.blocks[reduce].attrs["partials"].name,))
        norms = lay_out(order, {member.index: sums})
        if norms is not None:
            ctx.scope[ALL_NORMS] = norms
    elif reduce:
        run(reduce)
    for name in filter(None, (serve.get("schedule_block", ""), *serve["optimize_blocks"])):
        run(name)


def _fill(bucket: Bucket, generator: torch.Generator) -> None:
    """Makes gradients: multiples of 2^-16 up to 2^-6, without any rounding. Integers stay as they are."""
    if bucket.flat.is_floating_point():
        whole = torch.randint(-1024, 1025, (bucket.flat.numel(),), generator=generator, dtype=torch.int16)
        bucket.total.copy_(whole.to(torch.float32) / 65536.0)
    else:
        bucket.total.copy_(bucket.flat)
