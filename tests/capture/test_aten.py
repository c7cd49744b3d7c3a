"""Torch's operators as ops: inference from schemas and fake tensors, argument checks, effects."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Operator, Program, Ref, Sym, Type, registry


@pytest.fixture
def block() -> Block:
    program = Program("p")
    program.variable("x", Type("float32", ("batch", 8)), Kind.INPUT)
    program.variable("w", Type("float32", (4, 8)), Kind.PARAM)
    program.variable("count", Type("int64", ()), Kind.BUFFER)
    program.variable("n", Type("int"), Kind.INPUT)
    return program.block()


X, W, COUNT, N = Ref("x"), Ref("w"), Ref("count"), Ref("n")


@pytest.mark.parametrize(
    ("op", "args", "attrs", "types"),
    [
        ("aten.t", (W,), {}, ["float32[8, 4]"]),
        ("aten.linear", (X, W), {}, ["float32[batch, 4]"]),
        ("aten.view", (X, (-1, 4)), {}, ["float32[2*batch, 4]"]),
        ("aten.cat", ((X, X, X),), {}, ["float32[3*batch, 8]"]),
        ("aten.mm", (X, X), {}, None),
        ("aten.split.Tensor", (X, 3, 1), {}, ["float32[batch, 3]", "float32[batch, 3]", "float32[batch, 2]"]),
        ("aten.sum.dim_IntList", (X, (0,)), {"dtype": Sym("torch.float64")}, ["float64[8]"]),
        ("aten.gt.Scalar", (X, 0), {}, ["bool[batch, 8]"]),
        ("aten.add.Tensor", (COUNT, 1.5), {}, ["float32[]"]),
        ("aten.add.Tensor", (COUNT, 1), {}, ["int64[]"]),
        ("aten.full", ((N, 2), 0.5), {"device": Sym("@device")}, ["float32[n, 2]"]),
        (
            "aten.native_layer_norm",
            (X, (8,), None, None, 1e-5),
            {},
            ["float32[batch, 8]", "float32[batch, 1]", "float32[batch, 1]"],
        ),
        ("aten.sym_size.int", (X, 0), {}, ["int"]),
        ("aten.nonzero", (X,), {}, ["int64[unknown, 2]"]),
        ("aten.max_pool2d_with_indices", (X, (2, 2)), {}, None),
        ("aten._foreach_add_.Scalar", ((W,), 1), {}, []),
        ("prim.mul", (N, 2), {}, ["int"]),
        ("prim.truediv", (N, 2), {}, ["float"]),
        ("prim.lt", (N, 2), {}, ["bool"]),
    ],
)
def test_inference(
    block: Block, op: str, args: tuple[Any, ...], attrs: dict[str, Any], types: list[str] | None
) -> None:
    operator = Operator(op, args, attrs)
    if types is None:
        with pytest.raises(ProgramError):
            registry.infer(operator, block)
    else:
        assert [str(t) for t in registry.infer(operator, block)] == types


def test_shape_errors_speak_of_the_programs_dimensions(block: Block) -> None:
    with pytest.raises(ProgramError) as caught:
        block.append_op("aten.mm", X, W)
    assert "aten.mm does not take (float32[batch, 8], float32[4, 8])" in str(caught.value)
    assert "[batch, 8] X [4, 8]" in str(caught.value)
    assert "help: its schema is aten::mm(Tensor self, Tensor mat2) -> Tensor" in str(caught.value)


@pytest.mark.parametrize(
    ("op", "args", "attrs", "rule"),
    [
        ("aten.nothing", (X,), {}, "unknown-op"),
        ("aten.mm.default", (X, W), {}, "unknown-op"),
        ("nowhere.mm", (X, W), {}, "unknown-op"),
        ("aten.mm", (X,), {}, "shape"),
        ("aten.mm", (X, "w"), {}, "shape"),
        ("aten.sum", (X,), {"axis": 0}, "shape"),
        ("aten.view", (X, (1.5, 2)), {}, "shape"),
        ("prim.mul", (X, 2), {}, "operands"),
    ],
)
def test_arguments_are_checked(block: Block, op: str, args: tuple[Any, ...], attrs: dict[str, Any], rule: str) -> None:
    with pytest.raises(ProgramError, match=rf"^error\[{rule}\]"):
        block.append_op(op, *args, **attrs)
    assert block.ops == []


def test_writes_come_from_the_schema_and_from_what_it_hides(block: Block) -> None:
    def written(op: str, *args: Any, **attrs: Any) -> tuple[str, ...]:
        return registry.require(Operator(op)).written_operands(Operator(op, args, attrs))

    assert written("aten.add_.Tensor", X, 1) == ("x",)
    assert written("aten.add.Tensor", X, 1) == ()
    assert written("aten.add.out", X, X, out=W) == ("w",)
    assert written("aten._foreach_add_.Scalar", (X, W), 1) == ("x", "w")
    norm = (X, None, None, W, COUNT, True, 0.1, 1e-5)
    assert written("aten._native_batch_norm_legit", *norm) == ("w", "count")
    assert written("aten.native_batch_norm", *norm) == ("w", "count")
