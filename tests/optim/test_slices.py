"""An optimizer op gives the same bits on slices of a flat parameter as on the whole: shards do not show."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import graphft.ops.optimize  # noqa: F401  registers the ops
from graphft.ir import registry
from graphft.ops.context import Context
from graphft.optim.optimizers import SCALAR_STATE, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

OPTIMIZERS = [
    SGD(0.1),
    SGD(0.1, weight_decay=0.01, maximize=True),
    SGD(0.1, momentum=0.9, dampening=0.1),
    SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adam(1e-2, weight_decay=0.01),
    Adam(1e-2, betas=(0.8, 0.99), amsgrad=True),
    AdamW(1e-2),
    Adagrad(0.1, lr_decay=0.01, initial_accumulator_value=0.1, weight_decay=0.01),
    RMSprop(1e-2),
    RMSprop(1e-2, momentum=0.9, centered=True, weight_decay=0.01),
]


def run(optimizer: Optimizer, param: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Parameter and state after one update per gradient, by the op's kernel."""
    state = [
        torch.full(() if k == SCALAR_STATE else param.shape, v, dtype=param.dtype if k != SCALAR_STATE else None)
        for k, v in optimizer.state().items()
    ]
    param, lr = param.clone(), torch.tensor(optimizer.lr, dtype=torch.float64)
    kernel = registry.get(optimizer.op).kernel
    for grad in grads:
        kernel(Context(), param, grad, lr, *state, **optimizer.attributes())
    return [param, *state]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.op}-{OPTIMIZERS.index(o)}")
@given(data=st.data())
def test_slices_give_the_bits_of_the_whole(optimizer: Optimizer, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 1500), "elements")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), "dtype")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, (n - 1) // 64))), "cuts"))
    bounds = [0, *(c * 64 for c in cuts if c * 64 < n), n]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    param, *grads = (torch.randn(n, generator=generator).to(dtype) for _ in range(4))

    whole = run(optimizer, param, grads)
    parts = [run(optimizer, param[a:b], [g[a:b] for g in grads]) for a, b in itertools.pairwise(bounds)]
    for i, expected in enumerate(whole):
        pieces = [p[i] for p in parts]
        if expected.dim() == 0:
            assert all(torch.equal(p, expected) for p in pieces)
        else:
            assert torch.equal(torch.cat(pieces), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o.op}-{OPTIMIZERS.index(o)}")
def test_gradients_of_another_layout(optimizer: Optimizer) -> None:
    """A gradient is often a transposed view; the fused kernels of torch would take its memory in the wrong order."""
    param, *grads = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0))
    flat = run(optimizer, param.reshape(-1), [g.reshape(-1) for g in grads])
    transposed = run(optimizer, param, [g.t().contiguous().t() for g in grads])
    for whole, *others in zip(run(optimizer, param, grads), flat, transposed, strict=True):
        assert all(torch.equal(whole.reshape(other.shape), other) for other in others)
    expanded = [g[:1].expand(7, 5) for g in grads]
    for a, b in zip(run(optimizer, param, expanded), run(optimizer, param, [g.clone() for g in expanded]), strict=True):
        assert torch.equal(a, b)
