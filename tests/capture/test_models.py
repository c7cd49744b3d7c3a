"""One captured program, replayed for several batch sizes, does what eager torch does."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
from torch import Tensor

import graphft
from graphft.ir import Kind, Program
from graphft.ir.parser import parse
from graphft.ir.verify import verify
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


@pytest.mark.parametrize("name", ALL)
def test_program_is_valid_and_reads_back(name: str) -> None:
    _, program = captured(name)
    assert parse(str(program)) == program
    verify(program, require_values=True)


def test_capture_is_deterministic() -> None:
    _, program = captured("convnet")
    case = make("convnet")
    again = graphft.build(case.model, case.loss_fn, case.inputs)
    assert str(again) == str(program)
    assert [op.loc for op in again.block("step").ops] == [op.loc for op in program.block("step").ops]
