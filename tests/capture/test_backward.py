"""Gradients of hand-built programs: the same as those of a captured one, and of eager torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphft
from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Program, Type, Variable
from graphft.ir.parser import parse
from graphft.ir.verify import verify


def declare(values: dict[str, torch.Tensor]) -> tuple[Program, Block, dict[str, Variable]]:
    """A program with inputs x[batch, 8] and y[batch, 4], and these parameters."""
    program = Program("hand")
    variables = {
        n: program.variable(n, Type("float32", ("batch", size)), Kind.INPUT) for n, size in (("x", 8), ("y", 4))
    }
    for n, value in values.items():
        variables[n] = program.variable(n, Type("float32", tuple(value.shape)), Kind.PARAM, value)
    return program, program.block(), variables


def linear(block: Block, v: dict[str, Variable], op: str = "aten.linear") -> Variable:
    out = block.append_op(op, v["x"], v["weight"], v["bias"], outputs="out")
    return block.append_op("aten.mse_loss", out, v["y"], outputs="loss")


def test_equals_capture_and_eager() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    x, y = torch.randn(5, 8), torch.randn(5, 4)
    program, block, v = declare({n: p.detach() for n, p in model.named_parameters()})
    pairs = graphft.append_backward(linear(block, v))
    assert [(p.name, g.name) for p, g in pairs] == [("weight", "weight@GRAD"), ("bias", "bias@GRAD")]
    captured = graphft.build(model, lambda model, x, y: F.mse_loss(model(x), y), {"x": (None, 8), "y": (None, 4)})
    F.mse_loss(model(x), y).backward()
    names = ["loss", "weight@GRAD", "bias@GRAD"]
    mine = graphft.Executor().run(program, {"x": x, "y": y}, names)
    theirs = graphft.Executor().run(captured, {"x": x, "y": y}, names)
    for n in names:
        assert torch.equal(mine[n], theirs[n])
    assert torch.equal(mine["weight@GRAD"], model.weight.grad)
    assert parse(str(program)) == program
    verify(program, require_values=True)


def test_forward_ops_keep_their_place_names_and_text() -> None:
    """Views, in-place ops, sizes, unwanted results and ops behind the loss stay; only composite ops are written out."""
    _, block, v = declare({"weight": torch.randn(4, 8), "bias": torch.randn(4)})
    wt = block.append_op("aten.t", v["weight"], outputs="wt")
    h = block.append_op("aten.addmm", v["bias"], v["x"], wt, outputs="h")
    block.append_op("aten.relu_", h, outputs="r")
    n = block.append_op("aten.sym_size.int", v["x"], 0, outputs="n")
    normed = block.append_op("aten.native_layer_norm", h, (4,), None, None, 1e-5, outputs=["normed", None, None])[0]
    flat = block.append_op("aten.view", normed, (n, 4), outputs="flat")
    diff = block.append_op("aten.sub.Tensor", flat, v["y"], outputs="diff")
    sq = block.append_op("aten.pow.Tensor_Scalar", diff, 2, outputs="sq")
    loss = block.append_op("aten.mean", sq, dtype=None, outputs="loss")
    block.append_op("aten.abs", diff, outputs="metric")
    before = [(op.type, op.args, op.attrs) for op in block.ops]
    graphft.append_backward(loss)
    after = [
        (op.type, op.args, op.attrs)
        for op in block.ops
        if op.outputs[0] in ("wt", "h", "r", "n", "normed", "flat", "diff", "sq", "loss", "metric")
    ]
    assert after == before
    w, b = (block.program.values[n].clone().requires_grad_() for n in ("weight", "bias"))
    x, y = torch.randn(3, 8), torch.randn(3, 4)
    expected = ((F.layer_norm(torch.relu(torch.addmm(b, x, w.t())), (4,)) - y) ** 2).mean()
    expected.backward()
    out = graphft.Executor().run(block.program, {"x": x, "y": y}, ["loss", "weight@GRAD", "bias@GRAD", "metric"])
    assert torch.equal(out["loss"], expected)
    assert torch.equal(out["weight@GRAD"], w.grad)
    assert torch.equal(out["bias@GRAD"], b.grad)
    assert out["metric"].shape == (3, 4)


def test_composite_random_op_is_drawn_once() -> None:
    _, block, v = declare({"weight": torch.randn(4, 8), "bias": torch.randn(4)})
    out = block.append_op("aten.linear", v["x"], v["weight"], v["bias"])
    dropped = block.append_op("aten.dropout", out, 0.5, True, outputs="dropped")
    graphft.append_backward(block.append_op("aten.mean", dropped, outputs="loss"))
    got = graphft.Executor(seed=3).run(block.program, {"x": torch.randn(6, 8)}, ["dropped", "bias@GRAD"])
    mask = (got["dropped"] != 0).float()
    torch.testing.assert_close(got["bias@GRAD"], (mask * 2 / mask.numel()).sum(0))


def test_refused_and_left_as_it_was() -> None:
    program, block, v = declare({"weight": torch.randn(4, 8), "bias": torch.randn(4), "other": torch.randn(2)})

    def refused(loss: Variable, rule: str) -> None:
        text = str(program)
        with pytest.raises(ProgramError, match=rf"^error\[{rule}\]"):
            graphft.append_backward(loss)
        assert str(program) == text

    refused(v["x"], "loss")
    refused(block.append_op("aten.linear", v["x"], v["weight"], v["bias"], outputs="hidden"), "loss")
    loss = linear(block, v)
    refused(loss, "no-gradient")  # of %other
    graphft.append_backward(loss, params=["bias"])
    assert "bias@GRAD" in program.variables
    assert "weight@GRAD" not in program.variables
    refused(loss, "redeclared")


def test_an_op_before_its_operand_is_refused() -> None:
    program, block, v = declare({"weight": torch.randn(4, 8), "bias": torch.randn(4)})
    a = program.variable("a", Type("float32", ("batch", 4)))
    b = block.append_op("aten.add.Tensor", a, v["y"], outputs="b")
    block.append_op("aten.mul.Tensor", b, 2, outputs="a")
    loss = block.append_op("aten.mean", b, outputs="loss")
    with pytest.raises(ProgramError, match=r"^error\[out-of-order\]"):
        graphft.append_backward(loss, params=["weight"])
