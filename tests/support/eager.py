"""A program against plain torch: the same steps of the same model, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.ir import Program

Batch = Mapping[str, Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
INPUTS = {"x": (None, 8), "y": ((None,), torch.int64)}


def batches(count: int = 6) -> list[dict[str, Tensor]]:
    """Points, and the largest of their first three coordinates."""
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(8, 8, generator=generator) for _ in range(count)]
    return [{"x": x, "y": x[:, :3].argmax(1)} for x in xs]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Net(nn.Module):
    """Batch norm and dropout; what happens between its layers is given by a test, and so are more buffers."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor] = lambda net, h: h, **buffers: Tensor) -> None:
        super().__init__()
        self.a, self.bn, self.d, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)
        self.code, self.count, self.average, self.alias = code, 0, torch.zeros(()), [self.b.weight]
        for name, value in {"seen": torch.zeros(()), **buffers}.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.code(self, self.d(self.bn(self.a(x)))))


def sgd(lr: float = 0.2, momentum: float = 0.0) -> MakeOptimizer:
    """With momentum, torch's fused kernel is the one that programs run."""
    return lambda model: torch.optim.SGD(model.parameters(), lr, momentum, fused=bool(momentum) or None)


def in_torch(
    model: nn.Module,
    loss_fn: Any,
    batches: Sequence[Batch],
    optimizer: MakeOptimizer,
    clip: Callable[[list[nn.Parameter]], object] = lambda parameters: None,
) -> list[Tensor]:
    """Trains `model` in eager torch, seeded. Returns the loss of every step."""
    made = optimizer(model)
    torch.manual_seed(1)
    losses = []
    for batch in batches:
        made.zero_grad()
        result = loss_fn(model, **batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        clip(list(model.parameters()))
        made.step()
        losses.append(loss.detach().clone())
    return losses


def in_program(program: Program, batches: Sequence[Batch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Runs a minimized program, seeded alike. Returns losses and all values at the end."""
    executor = graphft.Executor()
    torch.manual_seed(1)
    losses = [executor.run(program, batch, "loss")["loss"] for batch in batches]
    return losses, executor.state(program)


def assert_trains_like_torch(
    model: nn.Module,
    loss_fn: Any,
    inputs: Mapping[str, Any],
    batches: Sequence[Batch],
    optimizer: MakeOptimizer | None = None,
    *,
    exact: bool = True,
    twin: nn.Module | None = None,
    **options: Any,
) -> Program:
    """Losses of every step and the final state_dict have the same bits, or without `exact` agree within rounding.

    `twin`: a second model of the same values, where deepcopy does not make one. The user's model and torch's generator
    are as before. Returns the program, as it was built.
    """
    optimizer = optimizer or sgd()
    eager = twin or copy.deepcopy(model)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    program = graphft.build(model, loss_fn, inputs, **options)
    built = program.clone()
    graphft.minimize(program, optimizer(model), model=model)
    assert graphft.check_capture(program, batches[:2]) or not exact
    assert torch.equal(torch.get_rng_state(), generator)
    expected = in_torch(eager, loss_fn, batches, optimizer)
    found, values = in_program(program, batches)
    final = graphft.state_dict(program, values)
    if not exact:
        torch.testing.assert_close(torch.stack(found), torch.stack(expected))
        torch.testing.assert_close(final, dict(eager.state_dict()), rtol=1e-4, atol=1e-6)
    else:
        assert [x.item() for x in found] == [x.item() for x in expected]
        assert not [n for n, t in eager.state_dict().items() if not torch.equal(final[n], t)]
    assert same(model.state_dict(), state)
    assert all(p.grad is None for p in model.parameters())
    return built
