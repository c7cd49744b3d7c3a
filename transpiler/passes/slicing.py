"""Cuts parameters and buffers into slices, places these on the shards, and groups them into buckets, which travel."""

from __future__ import annotations

from collections import defaultdict

from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Variable
from graphft.ir.dependence import memory_writes
from graphft.transpiler.config import JobConfig
from graphft.transpiler.layout import Reduce, evolving, is_float, itemsize, reduce_of, slices_of
from graphft.transpiler.programs import Programs


def slice_parameters(job: Programs, config: JobConfig) -> None:
    """Sets the attribute `slices` of every parameter and buffer: (start, end, shard) of its flat elements.

    A slice starts at a multiple of `slice_unit` elements, so that vector kernels give every element the same bits
    whatever the slices are. Slices are placed by bytes, the largest first, each on the shard that holds least. Integer
    buffers stay whole; a buffer that the step never writes becomes frozen, and stays with the trainers."""
    freeze_constant_buffers(job.trainer)
    ranges = _ranges(job.trainer, config, config.pservers)
    if len(ranges) < config.pservers:
        text = f"{config.pservers} pservers, but the parameters and buffers make only {len(ranges)} slices"
        help = f"use at most {len(ranges)} pservers, or a smaller min_block"
        raise ProgramError(text, rule="too-many-pservers", help=help)
    owners = _balance([(end - start) * itemsize(v.dtype) for v, start, end in ranges], config.pservers)
    slices: dict[str, tuple[tuple[int, int, int], ...]] = {}
    for (v, start, end), shard in zip(ranges, owners, strict=True):
        slices[v.name] = (*slices.get(v.name, ()), (start, end, shard))
    for v in evolving(job.trainer):
        v.attrs["slices"] = slices[v.name]


def most_shards(program: Program, config: JobConfig) -> int:
    """Returns how many shards there are slices for: at most `pservers`, and at least one."""
    program = program.clone()
    freeze_constant_buffers(program)
    fits = (n for n in range(config.pservers, 0, -1) if len(_ranges(program, config, n)) >= n)
    return next(fits, 1)


def freeze_constant_buffers(program: Program) -> None:
    written = {n for b in program.blocks.values() for op in b.ops for n in memory_writes(op, b)}
    for v in program.of_kind(Kind.BUFFER):
        if v.name not in written:
            v.kind = Kind.FROZEN


def _ranges(program: Program, config: JobConfig, shards: int) -> list[tuple[Variable, int, int]]:
    return [(v, start, end) for v in evolving(program) for start, end in _cut(v, config, shards)]


def _cut(variable: Variable, config: JobConfig, shards: int) -> list[tuple[int, int]]:
    """Returns the [start, end) ranges of a variable's slices."""
    numel, unit = variable.type.numel, config.slice_unit
    if not numel:
        text = f"%{variable.name} is {variable.type}: it has no fixed, positive number of elements"
        raise ProgramError(text, rule="slices", help="parameters and buffers have fixed shapes, and are not empty")
    if variable.kind is Kind.BUFFER and not is_float(variable):
        return [(0, numel)]
    units = -(-numel // unit)
    most = max(1, numel // unit // -(-config.min_block // unit))
    fit = max(1, config.bucket_bytes // (unit * itemsize(variable.dtype)))  # whole units in a slice
    count = min(units, max(min(shards, most), -(-units // fit)))
    starts = [i * units // count * unit for i in range(count)]
    return list(zip(starts, [*starts[1:], numel], strict=True))


def _balance(sizes: list[int], shards: int) -> list[int]:
    """Returns a shard for each size: the largest first, each to the shard with least so far. Ties go to the first."""
    loads, counts, owners = [0] * shards, [0] * shards, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(shards), key=lambda s: (loads[s], counts[s], s))
        loads[owners[i]] += sizes[i]
        counts[owners[i]] += 1
    return owners


def make_buckets(job: Programs, config: JobConfig) -> None:
    """Sets the attribute `buckets` of every parameter and buffer: (bucket, position in it) of each slice.

    A bucket holds slices of one shard, dtype and kind of reduction, `bucket_bytes` at most (or one larger slice).
    Parameters come in the reverse order of their first use, as backward makes their gradients; then buffers."""
    made = defaultdict[int, int](int)  # buckets so far, by shard
    filling: dict[tuple[int, str, Reduce], tuple[int, int, int]] = {}  # bucket, slices and bytes in it
    for v in _travel_order(job.trainer):
        places = []
        for s in slices_of(v):
            kind, size = (s.shard, v.dtype, reduce_of(v)), s.numel * itemsize(v.dtype)
            bucket, count, used = filling.get(kind, (-1, 0, 0))
            if bucket < 0 or used + size > config.bucket_bytes:
                bucket, count, used = made[s.shard], 0, 0
                made[s.shard] += 1
            places.append((bucket, count))
            filling[kind] = (bucket, count + 1, used + size)
        v.attrs["buckets"] = tuple(places)


def _travel_order(program: Program) -> list[Variable]:
    used: dict[str, int] = {}
    for i, op in enumerate(program.blocks["step"].ops):
        for name in op.reads:
            used.setdefault(name, i)
    parameters = sorted(program.of_kind(Kind.PARAM), key=lambda v: -used.get(v.name, 0))
    return [*parameters, *sorted(program.of_kind(Kind.BUFFER), key=lambda v: used.get(v.name, 0))]
