"""Slices cover every parameter exactly once, start at whole units, and are balanced; buckets keep to their size."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from graphft.errors import ProgramError
from graphft.ir import Kind, Program, Type
from graphft.transpiler.layout import Slice, all_slices, buckets_of, evolving, itemsize, slices_of
from graphft.transpiler.passes import make_buckets, slice_parameters
from graphft.transpiler.passes.slicing import most_shards
from graphft.transpiler.programs import Programs

DTYPES = ("float32", "float64", "bfloat16", "int64")


def program_of(variables: list[tuple[tuple[int, ...], str]]) -> Program:
    """Parameters (floats) and buffers (integers) of these shapes, which the step reads in order."""
    program = Program("any")
    step = program.block("step")
    for i, (shape, dtype) in enumerate(variables):
        kind = Kind.BUFFER if dtype == "int64" else Kind.PARAM
        v = program.variable(f"v{i}", Type(dtype, shape), kind, torch.zeros(shape, dtype=getattr(torch, dtype)))
        if kind is Kind.BUFFER:
            step.append_op("aten.add_.Tensor", v, 1)
        else:
            step.append_op("aten.neg", v)
    return program


def laid_out(
    program: Program, shards: int = 1, unit: int = 8192, min_block: int = 8192, size: int = 4 << 20
) -> Program:
    """The program with slices and buckets."""
    options: Any = SimpleNamespace(pservers=shards, slice_unit=unit, min_block=min_block, bucket_bytes=size)
    job = Programs(program.clone())
    slice_parameters(job, options)
    make_buckets(job, options)
    return job.trainer


shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple)
programs = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=8).map(program_of)


@example(program_of([((10, 13), "float64")]), 1, 128, 3, 1024)  # the rest behind a slice of max_bytes
@given(
    programs, st.integers(1, 4), st.sampled_from([64, 128, 8192]), st.integers(1, 500), st.sampled_from([1024, 1 << 22])
)
def test_slices(program: Program, shards: int, unit: int, min_block: int, max_bytes: int) -> None:
    options: Any = SimpleNamespace(pservers=shards, slice_unit=unit, min_block=min_block, bucket_bytes=max_bytes)
    if most_shards(program, options) < shards:
        with pytest.raises(ProgramError, match="too-many-pservers"):
            laid_out(program, shards, unit, min_block, max_bytes)
        return
    sliced = laid_out(program, shards, unit, min_block, max_bytes)
    loads = [0] * shards
    for v in evolving(sliced):
        slices = slices_of(v)
        assert [s.start for s in slices] == [0, *(s.end for s in slices[:-1])]
        assert slices[-1].end == v.type.numel
        assert all(s.start % unit == 0 for s in slices)
        assert len(slices) == 1 or v.kind is Kind.PARAM, "integer buffers stay whole"
        for s in slices:
            loads[s.shard] += s.numel * itemsize(v.dtype)
            assert s.numel * itemsize(v.dtype) <= max(max_bytes, unit * itemsize(v.dtype)) or v.kind is Kind.BUFFER
            allowed = min(min_block, max_bytes // itemsize(v.dtype) // 2)  # max_bytes may ask for smaller ones
            numel = math.prod(v.type.shape or ())
            rest = numel * itemsize(v.dtype) > max_bytes and s.end == numel  # behind slices as large as they may be
            assert s.numel >= min(allowed, numel) or rest or len(slices) == 1
    largest = max(s.numel * itemsize(sliced.variables[s.variable].dtype) for s in all_slices(sliced))
    assert max(loads) - min(loads) <= largest
    assert str(laid_out(program, shards, unit, min_block, max_bytes)) == str(sliced), "deterministic"


@given(programs, st.integers(1, 3), st.sampled_from([1024, 4096]))
def test_buckets(program: Program, shards: int, bucket_bytes: int) -> None:
    if len(program.variables) < 2 * shards:
        return
    laid = laid_out(program, shards, 64, 64, bucket_bytes)
    buckets = buckets_of(laid)
    packed = [s for b in buckets for s in b.slices]
    assert sorted(packed, key=_key) == sorted(all_slices(laid), key=_key)
    for shard in range(shards):
        assert [b.index for b in buckets if b.shard == shard] == list(range(sum(b.shard == shard for b in buckets)))
    for b in buckets:
        assert {s.shard for s in b.slices} == {b.shard}
        assert {laid.variables[s.variable].dtype for s in b.slices} == {b.dtype}
        assert b.numel * itemsize(b.dtype) <= bucket_bytes or len(b.slices) == 1
        assert b.reduce == ("first" if b.dtype == "int64" else "weighted_mean")


def _key(s: Slice) -> tuple[str, int]:
    return s.variable, s.start


def test_buckets_are_in_reverse_order_of_use() -> None:
    program = program_of([((64,), "float32")] * 4)
    laid = laid_out(program, 1, 64, 64, 512)
    assert [[s.variable for s in b.slices] for b in buckets_of(laid)] == [["v3", "v2"], ["v1", "v0"]]


def test_constant_buffers_become_frozen() -> None:
    program = program_of([((4,), "float32")])
    position = program.variable("position", Type("float32", (4,)), Kind.BUFFER, torch.zeros(4))
    program.blocks["step"].append_op("aten.add.Tensor", position, position)
    sliced = laid_out(program)
    assert sliced.variables["position"].kind is Kind.FROZEN
    assert program.variables["position"].kind is Kind.BUFFER


@pytest.mark.parametrize(("shape", "rule"), [((0, 3), "slices"), ((4,), "too-many-pservers")])
def test_what_cannot_be_placed(shape: tuple[int, ...], rule: str) -> None:
    with pytest.raises(ProgramError, match=rf"(?s)^error\[{rule}\].*help: "):
        laid_out(program_of([(shape, "float32")]), 2)
