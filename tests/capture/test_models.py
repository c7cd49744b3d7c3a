"""One captured program, replayed for several batch sizes, does what eager torch does."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.ir import Kind, Program
from graphft.ir.parser import parse
from graphft.ir.verify import verify
from tests.support.eager import assert_trains_like_torch
from tests.support.zoo import CASES, HUGGING_FACE, Case

SIZES = (5, 2, 8)
# Where the trace records torch's own decomposition of the RNN (all time steps of the input projection at once),
# sums are taken in another order than in the fused eager kernel: equal to float32 rounding, not bit by bit.
DECOMPOSED = {"lstm": 1e-5, "gru": 1e-5}

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
ALL = [*CASES, *(pytest.param(n, marks=needs_transformers) for n in HUGGING_FACE)]


def make(name: str) -> Case:
    torch.manual_seed(0)
    return (CASES | HUGGING_FACE)[name]()


@functools.cache
def captured(name: str) -> tuple[Case, Program]:
    case = make(name)
    return case, graphft.build(case.model, case.loss_fn, case.inputs)


def eager(case: Case, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Loss and gradients of the model itself."""
    torch.manual_seed(seed)
    case.model.zero_grad()
    result = case.loss_fn(case.model, **batch)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return {
        "loss": loss.detach(),
        **{graphft.grad_name(n): p.grad for n, p in case.model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("name", ALL)
def test_replay_equals_eager(name: str) -> None:
    case, program = captured(name)
    assert parse(str(program)) == program
    verify(program, require_values=True)
    executor = graphft.Executor()
    tolerance = DECOMPOSED.get(name, 0.0)
    for size in SIZES:
        batch = case.batch(size)
        torch.manual_seed(size)
        found = executor.run(program, batch, ["loss", *(f"{v.name}@GRAD" for v in program.of_kind(Kind.PARAM))])
        expected = eager(case, batch, seed=size)
        assert found.keys() == expected.keys()
        for n, value in expected.items():
            torch.testing.assert_close(found[n], value, rtol=0, atol=tolerance, msg=lambda m, n=n: f"{n}: {m}")
            assert found[n].stride() == value.stride(), n
    state = graphft.state_dict(program, executor.scope(program))
    assert state.keys() == case.model.state_dict().keys()
    for n, value in case.model.state_dict().items():
        assert torch.equal(state[n], value), n


def test_capture_is_deterministic() -> None:
    _, program = captured("convnet")
    case = make("convnet")
    again = graphft.build(case.model, case.loss_fn, case.inputs)
    assert str(again) == str(program)
    assert [op.loc for op in again.block("step").ops] == [op.loc for op in program.block("step").ops]


def transcribed(model: nn.Module, x: Tensor, y: Tensor, steps: Tensor, letters: Tensor) -> Tensor:
    return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), y, steps, letters, zero_infinity=True)


def test_ctc_loss_with_tensors_of_lengths() -> None:
    torch.manual_seed(0)
    inputs = {
        "x": (None, 12, 8),
        "y": ((None, 4), torch.int64),
        "steps": ((None,), torch.int64),
        "letters": ((None,), torch.int64),
    }

    def batch(n: int) -> dict[str, Tensor]:
        lengths = {"steps": torch.randint(8, 13, (n,)), "letters": torch.randint(1, 5, (n,))}
        return {"x": torch.randn(n, 12, 8), "y": torch.randint(1, 5, (n, 4)), **lengths}

    program = assert_trains_like_torch(nn.Linear(8, 5), transcribed, inputs, [batch(12), batch(5)])
    assert program.block("step").program.find_op("aten._ctc_loss.Tensor") is not None


def test_margin_losses() -> None:
    """While torch traces, its multilabel loss counts the labels that pad a target: up to four times as large."""

    def multilabel(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.multilabel_margin_loss(model(x), y)

    def multi(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.multi_margin_loss(model(x), y[:, 0].abs(), p=2, weight=torch.arange(1.0, 7.0))

    torch.manual_seed(0)
    inputs = {"x": (None, 4), "y": ((None, 6), torch.int64)}
    batches = [{"x": torch.randn(n, 4), "y": torch.randint(-1, 6, (n, 6))} for n in (12, 5)]
    for loss_fn in (multilabel, multi):
        assert_trains_like_torch(nn.Linear(4, 6), loss_fn, inputs, batches)
