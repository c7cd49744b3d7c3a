"""Groups slices into buckets, the unit that travels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from graphft.ir import Kind, Program, Variable
from graphft.transpiler.layout import Reduce, Slice, evolving, itemsize, reduce_of, slices_of
from graphft.transpiler.programs import Programs


@dataclass(frozen=True)
class MakeBuckets:
    """Sets the attribute `buckets` of every parameter and buffer: (bucket, position in it) of each slice.

    A bucket holds slices of one shard, one dtype and one kind of reduction, `bucket_bytes` at most (or one slice that
    is larger). Parameters come in the reverse order of their first use, so that the first gradients of backward fill
    the first bucket; then buffers, whose updates are there before backward begins, in the order of their first use.
    """

    name: ClassVar[str] = "make-buckets"
    bucket_bytes: int = 4 << 20

    def run(self, job: Programs) -> Programs:
        job = job.clone()
        places = self.pack(job.trainer)
        for v in evolving(job.trainer):
            v.attrs["buckets"] = tuple(places[s] for s in slices_of(v))
        return job

    def pack(self, program: Program) -> dict[Slice, tuple[int, int]]:
        """(bucket, position) of every slice."""
        places: dict[Slice, tuple[int, int]] = {}
        buckets = defaultdict[int, int](int)  # made so far, by shard
        filling: dict[tuple[int, str, Reduce], tuple[int, int, int]] = {}  # bucket, slices and bytes in it
        for v in _travel_order(program):
            for s in slices_of(v):
                kind, size = (s.shard, v.dtype, reduce_of(v)), s.numel * itemsize(v.dtype)
                bucket, count, used = filling.get(kind, (-1, 0, 0))
                if bucket < 0 or used + size > self.bucket_bytes:
                    bucket, count, used = buckets[s.shard], 0, 0
                    buckets[s.shard] += 1
                places[s] = (bucket, count)
                filling[kind] = (bucket, count + 1, used + size)
        return places


def _travel_order(program: Program) -> list[Variable]:
    used: dict[str, int] = {}
    for i, op in enumerate(program.blocks["step"].ops):
        for name in op.reads:
            used.setdefault(name, i)
    parameters = sorted(program.of_kind(Kind.PARAM), key=lambda v: -used.get(v.name, 0))
    return [*parameters, *sorted(program.of_kind(Kind.BUFFER), key=lambda v: used.get(v.name, 0))]
