"""Clipping: against torch, and independent of how gradients are sliced over shards."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Kind, Program, Type
from graphft.ops.context import Context
from graphft.ops.gradients import UNIT, clip_by_global_norm, clip_by_value, squared_norms
from graphft.optim.optimizers import ClipByGlobalNorm, ClipByValue

CTX = Context()


def gradients(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


@pytest.mark.parametrize("max_norm", [0.5, 100.0, 1e6])
def test_global_norm_against_torch(max_norm: float) -> None:
    grads = gradients(3 * UNIT + 5, 7, UNIT, 100_000)
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)

    sqnorm = squared_norms(CTX, *grads)
    assert sqnorm.dtype == torch.float64
    assert sqnorm.shape == (4 + 1 + 1 + 13,)
    for p, g in zip(params, grads, strict=True):
        clip_by_global_norm(CTX, g, sqnorm, max_norm=max_norm)
        torch.testing.assert_close(g, p.grad, rtol=1e-6, atol=0)  # torch's own norm is summed in float32


def test_a_small_norm_changes_no_bit() -> None:
    (grad,) = gradients(1000)
    before = grad.clone()
    clip_by_global_norm(CTX, grad, squared_norms(CTX, grad), max_norm=1000.0)
    assert torch.equal(grad, before)


def test_units_are_sums_of_their_own_squares() -> None:
    (grad,) = gradients(2 * UNIT + 17)
    exact = [math.fsum(x * x for x in part.double().tolist()) for part in grad.split(UNIT)]
    torch.testing.assert_close(squared_norms(CTX, grad), torch.tensor(exact, dtype=torch.float64), rtol=1e-14, atol=0)


@given(st.data())
def test_partial_sums_do_not_depend_on_the_slices(data: st.DataObject) -> None:
    """Shards compute the units of their slices; put in canonical order, they are those of the whole gradients."""
    unit = data.draw(st.sampled_from([64, 128, UNIT]), "unit")
    sizes = data.draw(st.lists(st.integers(1, 5 * unit), min_size=1, max_size=4), "sizes")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), "dtype")
    grads = gradients(*sizes, dtype=dtype)
    shards = data.draw(st.integers(1, 4), "shards")
    slices = [(i, a, min(b, n)) for i, n in enumerate(sizes) for a, b in _cuts(data, n, unit)]
    owner = data.draw(st.lists(st.integers(0, shards - 1), min_size=len(slices), max_size=len(slices)), "owner")

    parts: dict[tuple[int, int], Tensor] = {}
    for shard in range(shards):
        mine = [s for s, o in zip(slices, owner, strict=True) if o == shard]
        if not mine:
            continue
        sums = squared_norms(CTX, *(grads[i][a:b] for i, a, b in mine), unit=unit)
        counts = [-(-(b - a) // unit) for _, a, b in mine]
        parts |= {(i, a): p for (i, a, _), p in zip(mine, sums.split(counts), strict=True)}
    assert torch.equal(torch.cat([parts[k] for k in sorted(parts)]), squared_norms(CTX, *grads, unit=unit))


def _cuts(data: st.DataObject, n: int, unit: int) -> list[tuple[int, int]]:
    inner = data.draw(st.sets(st.integers(1, max(1, (n - 1) // unit))), "cuts")
    bounds = [0, *(c * unit for c in sorted(inner) if c * unit < n), n]
    return list(itertools.pairwise(bounds))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows(bad: float) -> None:
    grads = gradients(10, 20)
    grads[0][3] = bad
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    sqnorm = squared_norms(CTX, *grads)
    for p, g in zip(params, grads, strict=True):
        clip_by_global_norm(CTX, g, sqnorm, max_norm=1.0)
        assert torch.equal(g.isnan(), p.grad.isnan())


def test_by_value_against_torch() -> None:
    grad = gradients(1000)[0].view(50, 20).t()
    param = torch.nn.Parameter(torch.zeros(20, 50))
    param.grad = grad.clone()
    torch.nn.utils.clip_grad_value_([param], 0.7)
    clip_by_value(CTX, grad, limit=0.7)
    assert torch.equal(grad, param.grad)


def test_partial_sums_have_a_known_shape() -> None:
    program = Program()
    a = program.variable("a@GRAD", Type("float32", (3, UNIT)), Kind.INPUT)
    b = program.variable("b@GRAD", Type("float32", ()), Kind.INPUT)
    assert program.block("reduce").append_op("squared_norms", a, b).type == Type("float64", (4,))
    c = program.variable("c@GRAD", Type("float32", ("batch",)), Kind.INPUT)
    with pytest.raises(ProgramError, match="symbolic-shape"):
        program.block("reduce").append_op("squared_norms", c)


@pytest.mark.parametrize("make", [ClipByValue, ClipByGlobalNorm])
@pytest.mark.parametrize("bad", [0, -1.0, "1", True, math.nan])
def test_limits_are_positive_numbers(make: type, bad: object) -> None:
    with pytest.raises(GraphftError, match="optimizer-option"):
        make(bad)
