"""How large a message may be: what the job's programs say travels, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphft.ir import Program
from graphft.runtime.transport.port import Limits

REQUEST_BYTES = 16 << 10
"""Of the header of anything that a trainer sends."""
MAX_QUEUED = 1000
"""Small messages that may wait at one peer, ..."""
IN_TURN = 4
"""... and contributions of all slots: this step's, the next one's, and repetitions."""


def received_buckets(program: Program) -> dict[tuple[int, int], tuple[int, torch.dtype]]:
    """By (shard, bucket), the bytes and the dtype of what a trainer's block step receives."""
    sizes = {}
    for op in program.blocks["step"].ops:
        if op.type == "recv":
            dtype = getattr(torch, program.variables[op.operand("tensors").name].dtype)
            elements = sum(end - start for start, end in op.attrs["slices"])
            sizes[op.attrs["shard"], op.attrs["bucket"]] = elements * dtype.itemsize, dtype
    return sizes


def trainer_limits(program: Program) -> Limits:
    sizes = received_buckets(program)
    return Limits(max_frame=max(nbytes for nbytes, _ in sizes.values()), max_queued=MAX_QUEUED + IN_TURN * len(sizes))


def pserver_limits(programs: Sequence[Program], shard: int, slots: int) -> Limits:
    """Of a shard's sockets: its own buckets, and the partial sums of all shards."""
    program = programs[shard]
    buckets = [op for op in program.blocks["init"].ops if op.type == "bucket"]
    sizes = [sum(_nbytes(program, ref.name) for ref in op.args) for op in buckets]
    return Limits(
        max_frame=max([*sizes, *map(_sums_bytes, programs)]),
        max_header=REQUEST_BYTES,
        max_queued=MAX_QUEUED + IN_TURN * slots * len(sizes),
    )


def _sums_bytes(program: Program) -> int:
    """Bytes of the largest partial sums (float64) that this shard is sent."""
    order = program.blocks["reduce"].attrs.get("order", ()) if "reduce" in program.blocks else ()
    return max((8 * (start + count) for _, start, count in order), default=0)


def _nbytes(program: Program, name: str) -> int:
    variable = program.variables[name]
    return int(variable.type.numel or 0) * int(getattr(torch, variable.dtype).itemsize)
