"""Values that are not finite are found, and told with what may cause them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from graphft.runtime.roles.programs import trainer_scope
from graphft.runtime.roles.trainer.finite_check import FiniteCheck, is_finite
from tests.support.programs_by_hand import linear_job

HUGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_one_value_is_enough(dtype: torch.dtype) -> None:
    values = torch.full((9000,), 0.5, dtype=dtype)
    assert is_finite(values)
    for bad in (math.inf, -math.inf, math.nan):
        values[8191] = bad
        assert not is_finite(values)


def test_finite_values_whose_sum_is_not_are_finite() -> None:
    assert is_finite(torch.full((64,), HUGE))
    assert is_finite(torch.cat([torch.full((64,), HUGE), torch.full((64,), -HUGE)]))
    assert is_finite(torch.full((64,), torch.finfo(torch.float16).max, dtype=torch.float16))


def check(**columns: Tensor) -> FiniteCheck:
    program = linear_job(pservers=2, trainers=1, ft=False).trainer_program()
    scope = trainer_scope(program)
    for name in ("w", "b"):
        scope[name].zero_()
    return FiniteCheck(program, scope, columns)


def test_a_gradient_is_named_with_the_column_that_may_cause_it() -> None:
    found = check(x=torch.tensor([1.0, math.nan, math.inf]), y=torch.zeros(3))
    found.numbers = lambda: [7, 19, 4]
    found.names = lambda records: [f"line {record + 2} of f.csv" for record in records]
    found.look_at_loss(torch.tensor(0.25))
    assert found.finite
    gradient = torch.zeros(200, 1)
    gradient[:3] = math.inf
    found.look_at_bucket(0, 0, gradient.view(-1), [gradient])
    assert not found.finite
    assert found.describe() == (
        "the gradients of w (3 values) are not finite; the batch itself holds such values in column x (2 values), "
        "of line 6 of f.csv, line 21 of f.csv"
    )
    found.begin()
    assert found.finite
    assert not found.records


def test_a_bucket_may_have_two_slices_of_a_gradient() -> None:
    program = linear_job(pservers=2, trainers=1, ft=False).trainer_program()
    send = next(op for op in program.blocks["step"].ops if op.type == "send" and "w@GRAD" in op.reads)
    send.args = (*send.args, *send.args)
    found, gradient = FiniteCheck(program, {}), torch.full((200, 1), math.nan)
    found.look_at_bucket(send.attrs["shard"], send.attrs["bucket"], gradient.view(-1), [gradient] * len(send.args))
    assert found.gradients == {"w": 200}


def test_a_loss_is_told_with_what_is_known_of_its_cause() -> None:
    found = check(x=torch.zeros(3))
    found.look_at_loss(torch.tensor(math.inf))
    assert found.describe() == "the loss is inf; the batch and the parameters before this step are finite"
    found.scope["b"].fill_(math.nan)
    assert "so are parameters before this step: b (1 values)" in found.describe()
