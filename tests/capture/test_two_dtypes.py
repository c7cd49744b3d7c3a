"""Operands of two dtypes: what torch computes is captured, what it refuses is refused before a trainer starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphft
from graphft.errors import GraphftError

F16, F32, F64, I64 = torch.bfloat16, torch.float32, torch.float64, torch.int64
ROWS = 4


class Two(nn.Module):
    """A function of two tensors [batch, 3], the first with a gradient."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x * self.scale.to(x.dtype), y)


def written(index: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def of(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        x[index(x)] = value(y)
        return x

    return of


def first(x: Tensor) -> Tensor:
    return torch.zeros(1, dtype=I64)


CASES = {
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "mse_loss": F.mse_loss,
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y[0], y[1], training=True),
    "layer_norm": lambda x, y: F.layer_norm(x, (3,), y[0], y[1]),
    "cross": torch.linalg.cross,
    "index_put": written(first, lambda y: y[:1]),
    "index_put of a mask, one value": written(lambda x: x > 1, lambda y: y.sum()),
    "index_add": lambda x, y: x.index_add(0, first(x), y[:1]),
    "matmul": lambda x, y: x @ y.T,
    "where": lambda x, y: torch.where(x > 1, x, y),
}


@pytest.mark.parametrize("dtypes", [(F64, F32), (F16, F32), (F32, F16), (F32, I64)])
@pytest.mark.parametrize("name", CASES)
def test_captured_as_torch_computes_it(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(0)
    x, y = torch.rand(ROWS, 3).to(dtypes[0]), torch.rand(ROWS, 3).to(dtypes[1])
    model = Two(CASES[name])

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x, y).float().mean()

    try:
        loss = loss_fn(model, x, y)
        loss.backward()
    except (RuntimeError, IndexError) as error:
        refused = str(error)
    else:
        refused = ""
    inputs = {"x": ((ROWS, 3), dtypes[0]), "y": ((ROWS, 3), dtypes[1])}
    with pytest.raises(GraphftError) if refused else nullcontext() as caught:
        program = graphft.build(model, loss_fn, inputs)
        found = graphft.Executor().run(program, {"x": x, "y": y}, ["loss"])["loss"]
        assert torch.equal(found, loss.detach())
    if refused:
        assert caught.value.rule in ("capture", "capture-check")
        assert "one dtype" in caught.value.help
