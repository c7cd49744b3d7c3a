"""A block as one Python function: its text, what it keeps alive, and how it fails."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Block, Kind, Operator, Program, Ref, Sym, Type, registry
from graphft.ops.context import Context, Interrupt
from graphft.runtime.execute.lowering import lower


@pytest.fixture
def block() -> Block:
    program = Program("p")
    program.variable("x", Type("float32", ("batch", 4)), Kind.INPUT)
    program.variable("fc.weight", Type("float32", (4, 4)), Kind.PARAM)
    return program.block()


def scope() -> dict[str, Any]:
    return {"x": torch.ones(2, 4), "fc.weight": torch.eye(4)}


def test_source(block: Block) -> None:
    h = block.append_op("aten.mm", Ref("x"), Ref("fc.weight"), outputs="h")
    block.append_op("aten.split.Tensor", h, 3, 1, outputs=["a", None])
    block.append_op("aten.sum", Ref("a"), dtype=Sym("torch.float64"), outputs="class")
    block.append_op("aten.add.Tensor", Ref("fc.weight"), 1, alpha=float("inf"), outputs="fc.weight")
    block.append_op("aten.full", (2,), -1, device=Sym("@device"), outputs="fc_weight")
    assert (
        lower(block, fetch=["class", "fc_weight"]).source
        == """\
def run(ctx, scope):
    x = scope['x']
    fc_weight = scope['fc.weight']
    h = aten_mm(x, fc_weight); del x
    [a, _] = aten_split_Tensor(h, 3, 1); del h, _
    v_class = aten_sum(a, dtype=torch_float64); del a
    fc_weight = aten_add_Tensor(fc_weight, 1, alpha=float('inf'))
    scope['fc.weight'] = fc_weight; del fc_weight
    fc_weight__2 = aten_full((2, ), -1, device=_device)
    return (v_class, fc_weight__2, )
"""
    )


def test_values_are_freed_after_their_last_use(block: Block, own_ops: list[Any]) -> None:
    """While op k runs, what only earlier ops needed is gone."""
    a = block.append_op("aten.mm", Ref("x"), Ref("fc.weight"), outputs="a")
    block.ops.append(Operator("test_watch", (a.ref,)))
    b = block.append_op("aten.relu", a, outputs="b")
    block.ops.append(Operator("test_count"))
    block.append_op("aten.sum", b, outputs="loss")
    values = scope()
    lower(block, fetch=["loss"])(Context(scope=values), values)
    assert own_ops == [1, 0]


@pytest.fixture
def own_ops() -> Any:
    """Ops of ours that note how many of the watched tensors are alive, and one that raises what the scope holds."""
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def count() -> None:
        gc.collect()
        counts.append(sum(r() is not None for r in alive))

    @registry.op("test_watch")
    def watch(ctx: Context, value: Tensor) -> None:
        alive.append(weakref.ref(value))
        count()

    @registry.op("test_count", effect=True)
    def counting(ctx: Context) -> None:
        count()

    @registry.op("test_raise", effect=True)
    def raising(ctx: Context, *, key: str) -> None:
        raise ctx.scope[key]  # type: ignore[misc]

    yield counts
    for name in ("test_watch", "test_count", "test_raise"):
        del registry._OPS[name]


def test_starts_in_the_middle(block: Block) -> None:
    block.append_op("aten.relu", Ref("x"), outputs="h")
    block.append_op("aten.sum", Ref("h"), outputs="s")
    run = lower(block, fetch=["s"], start=1)
    assert run(Context(), {"h": torch.ones(3)})[0] == 3
    with pytest.raises(ProgramError, match=r"^error\[no-value\]"):
        run(Context(), {})


def test_failing_op_is_shown(block: Block) -> None:
    block.append_op("aten.relu", Ref("x"), outputs="h")
    block.append_op("aten.mm", Ref("h"), Ref("fc.weight"), outputs="y", loc="model.py:12 in forward")
    run = lower(block, fetch=["y"])
    with pytest.raises(ProgramError) as caught:
        run(Context(), {"x": torch.ones(2, 3), "fc.weight": torch.eye(4)})
    text = str(caught.value)
    assert caught.value.rule == "op-failed"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (caught.value.block, caught.value.index) == (block, 1)
    assert "written by model.py:12 in forward" in text
    assert "%h: float32[2, 3] on cpu, %fc.weight: float32[4, 4] on cpu" in text


@pytest.mark.parametrize("error", [Interrupt("stop"), GraphftError("no lease", rule="lease-lost")])
def test_interrupts_and_own_errors_pass_through(block: Block, own_ops: list[int], error: Exception) -> None:
    block.ops.append(Operator("test_raise", (), {"key": "error"}))
    with pytest.raises(type(error)) as caught:
        lower(block)(Context(scope={"error": error}), {})  # type: ignore[dict-item]
    assert caught.value is error


def test_other_errors_of_own_ops_are_located(block: Block, own_ops: list[int]) -> None:
    block.ops.append(Operator("test_raise", (), {"key": "error"}))
    with pytest.raises(ProgramError) as caught:
        lower(block)(Context(scope={"error": KeyError("gone")}), {})  # type: ignore[dict-item]
    assert (caught.value.rule, caught.value.index) == ("op-failed", 0)
