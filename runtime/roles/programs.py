"""Facts that roles read off the job's programs: what travels and how large it is, what is in a scope at first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphft.ir import Kind, Program, registry
from graphft.optim.optimizers import OPTIMIZER_OPS
from graphft.runtime.transport.port import Limits

REQUEST_BYTES = 16 << 10
"""Bound of the header of anything that a trainer sends."""
MAX_QUEUED = 1000
"""Small messages that may wait at one peer, ..."""
IN_TURN = 4
"""... and contributions of all slots: this step's, the next one's, and repetitions."""


def received_buckets(program: Program) -> dict[tuple[int, int], tuple[int, torch.dtype]]:
    """Returns, by (shard, bucket), the bytes and the dtype of what a trainer's block step receives."""
    sizes = {}
    for op in program.blocks["step"].ops:
        if op.type == "recv":
            dtype = getattr(torch, program.variables[op.operand("tensors").name].dtype)
            elements = sum(end - start for start, end in op.attrs["slices"])
            sizes[op.attrs["shard"], op.attrs["bucket"]] = elements * dtype.itemsize, dtype
    return sizes


def buckets_of(program: Program, shards: int) -> tuple[tuple[int, ...], ...]:
    """Returns the buckets of each shard, as a trainer's block step receives them."""
    known = received_buckets(program)
    return tuple(tuple(sorted(bucket for of, bucket in known if of == shard)) for shard in range(shards))


def trainer_limits(program: Program) -> Limits:
    sizes = received_buckets(program)
    return Limits(max_frame=max(nbytes for nbytes, _ in sizes.values()), max_queued=MAX_QUEUED + IN_TURN * len(sizes))


def pserver_limits(programs: Sequence[Program], shard: int, slots: int) -> Limits:
    """Returns the limits of a shard's sockets: its own buckets, and the partial sums of all shards."""
    program = programs[shard]
    buckets = [op for op in program.blocks["init"].ops if op.type == "bucket"]
    sizes = [sum(_nbytes(program, ref.name) for ref in op.args) for op in buckets]
    return Limits(
        max_frame=max([*sizes, *map(_sums_bytes, programs)]),
        max_header=REQUEST_BYTES,
        max_queued=MAX_QUEUED + IN_TURN * slots * len(sizes),
    )


def _sums_bytes(program: Program) -> int:
    """Returns the bytes of the largest partial sums (float64) that this shard is sent."""
    order = program.blocks["reduce"].attrs.get("order", ()) if "reduce" in program.blocks else ()
    return max((8 * (start + count) for _, start, count in order), default=0)


def _nbytes(program: Program, name: str) -> int:
    variable = program.variables[name]
    return int(variable.type.numel or 0) * int(getattr(torch, variable.dtype).itemsize)


def push_timeout_of(program: Program) -> float:
    """Returns the seconds that a shard has to apply a batch."""
    barrier = program.find_op("send_barrier")
    assert barrier is not None
    return float(registry.attr(barrier, "push_timeout"))


def learning_rates_of(program: Program) -> tuple[str, ...]:
    """Returns the variables of the learning rates: one for each rate that its optimizers use."""
    ops = [op for block in program.blocks.values() for op in block.ops if op.type in OPTIMIZER_OPS]
    return tuple(sorted({op.operand("lr").name for op in ops}))


def trainer_scope(program: Program, device: str = "cpu") -> dict[str, Tensor]:
    """Returns a trainer's scope at first: constants as saved; what pservers own, zero until it is received: a tensor
    that is received in parts is no NaN meanwhile."""
    scope: dict[str, Tensor] = {}
    for v in program.variables.values():
        if v.name in program.values:
            scope[v.name] = program.values[v.name].to(device, copy=True)
        elif v.kind in (Kind.PARAM, Kind.BUFFER):
            scope[v.name] = torch.zeros([int(d) for d in v.shape], dtype=getattr(torch, v.dtype), device=device)
    return scope
