"""Cuts parameters and buffers into slices, and places these on the shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Variable
from graphft.ir.dependence import memory_writes
from graphft.transpiler.layout import evolving, is_float, itemsize
from graphft.transpiler.programs import Programs


@dataclass(frozen=True)
class SliceParameters:
    """Sets the attribute `slices` of every parameter and buffer: (start, end, shard) of its flat elements.

    A slice starts at a multiple of `slice_unit` elements: vector kernels then give every element the same bits
    whatever the slices are, and the partial sums of a global norm are those of the whole. A variable is cut into as
    many slices as there are shards, if none gets smaller than `min_block` elements, and into more if one would be
    larger than `max_bytes`. Integer buffers stay whole. Slices are placed by bytes, the largest first, each on the
    shard that holds least: no shard holds more than another by more than one slice.

    A buffer that the step never writes does not evolve: it becomes frozen, and stays with the trainers.
    """

    name: ClassVar[str] = "slice-parameters"
    shards: int = 1
    slice_unit: int = 8192
    min_block: int = 8192
    max_bytes: int = 4 << 20

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        _freeze_constant_buffers(job.trainer)
        ranges = self._ranges(job.trainer)
        if len(ranges) < self.shards:
            raise ProgramError(
                f"{self.shards} pservers, but the program's parameters and buffers make only {len(ranges)} slices",
                rule="too-many-pservers",
                help=f"use at most {len(ranges)} pservers, or a smaller min_block",
            )
        owners = _balance([(end - start) * itemsize(v.dtype) for v, start, end in ranges], self.shards)
        slices: dict[str, tuple[tuple[int, int, int], ...]] = {}
        for (v, start, end), shard in zip(ranges, owners, strict=True):
            slices[v.name] = (*slices.get(v.name, ()), (start, end, shard))
        for v in evolving(job.trainer):
            v.attrs["slices"] = slices[v.name]
        return job

    def most_shards(self, program: Program) -> int:
        """How many shards there are slices for: at most `shards`, and at least one."""
        program = program.clone()
        _freeze_constant_buffers(program)
        fits = (n for n in range(self.shards, 0, -1) if len(replace(self, shards=n)._ranges(program)) >= n)
        return next(fits, 1)

    def _ranges(self, program: Program) -> list[tuple[Variable, int, int]]:
        return [(v, start, end) for v in evolving(program) for start, end in self.cut(v)]

    def cut(self, variable: Variable) -> list[tuple[int, int]]:
        """The [start, end) ranges of a variable's slices."""
        numel = variable.type.numel
        if not numel:
            raise ProgramError(
                f"%{variable.name} is {variable.type}: it has no fixed, positive number of elements",
                rule="slices",
                help="parameters and buffers have fixed shapes, and are not empty",
            )
        if variable.kind is Kind.BUFFER and not is_float(variable):
            return [(0, numel)]
        units = -(-numel // self.slice_unit)
        min_units = -(-self.min_block // self.slice_unit)
        most = max(1, numel // self.slice_unit // min_units)
        fit = max(1, self.max_bytes // (self.slice_unit * itemsize(variable.dtype)))  # whole units in a slice
        count = min(units, max(min(self.shards, most), -(-units // fit)))
        starts = [i * units // count * self.slice_unit for i in range(count)]
        return list(zip(starts, [*starts[1:], numel], strict=True))


def _balance(sizes: list[int], shards: int) -> list[int]:
    """A shard for each size: the largest first, each to the shard with least so far. Ties go to the first."""
    loads = [0] * shards
    counts = [0] * shards
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(shards), key=lambda s: (loads[s], counts[s], s))
        loads[owners[i]] += sizes[i]
        counts[owners[i]] += 1
    return owners


def _freeze_constant_buffers(program: Program) -> None:
    written = {n for b in program.blocks.values() for op in b.ops for n in memory_writes(op, b)}
    for v in program.of_kind(Kind.BUFFER):
        if v.name not in written:
            v.kind = Kind.FROZEN
