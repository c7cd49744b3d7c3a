"""Twenty steps of a program against twenty steps of eager torch, for every optimizer and kind of model.

Losses, parameters, buffers and optimizer state are bit-identical: the same kernels run on the same values, torch's
fused ones where it has them on the CPU (SGD, Adam, AdamW, Adagrad), and its plain ones for RMSprop.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import graphft
from graphft.errors import GraphftError
from graphft.optim.optimizers import Optimizer
from tests.support.eager import INPUTS, assert_trains_like_torch, batches, classify, in_program, in_torch, sgd
from tests.support.zoo import CASES

STEPS = 20
MODELS = ["convnet", "transformer", "tied"]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": graphft.SGD(0.1),
    "sgd-momentum": graphft.SGD(0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd-nesterov": graphft.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": graphft.Adam(1e-2),
    "adam-amsgrad": graphft.Adam(1e-2, weight_decay=0.01, amsgrad=True),
    "adamw": graphft.AdamW(1e-2),
    "adagrad": graphft.Adagrad(0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "rmsprop": graphft.RMSprop(1e-3),
    "rmsprop-centered": graphft.RMSprop(1e-3, momentum=0.9, centered=True, weight_decay=0.01),
}


@dataclasses.dataclass
class Subject:
    """A model, its program as captured, and batches for both."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    program: graphft.Program
    batches: list[dict[str, Tensor]]

    def fresh(self) -> Subject:
        return dataclasses.replace(self, model=copy.deepcopy(self.model), program=self.program.clone())

    def eager(self, optimizer: torch.optim.Optimizer, start: int = 0, stop: int = STEPS, **clip: Any) -> Tensor:
        """Trains the model; returns the losses."""
        return torch.stack(in_torch(self.model, self.loss_fn, self.batches[start:stop], lambda _: optimizer, **clip))

    def run(self, start: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Runs the program; returns the losses, and the values at the end."""
        losses, values = in_program(self.program, self.batches[start:])
        return torch.stack(losses), values


def capture(name: str) -> Subject:
    torch.manual_seed(0)
    case = CASES[name]()
    program = graphft.build(case.model, case.loss_fn, case.inputs)
    return Subject(case.model, case.loss_fn, program, [case.batch(4 + k % 3) for k in range(STEPS)])


@pytest.fixture(scope="module", params=MODELS)
def captured(request: pytest.FixtureRequest) -> Subject:
    return capture(request.param)


@pytest.fixture
def mlp() -> Subject:
    return capture("mlp")


def counterpart(optimizer: Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer in torch, fused where torch has a fused kernel on the CPU."""
    fused = {} if optimizer.op == "rmsprop" else {"fused": True}
    return optimizer.torch_class(parameters, **dataclasses.asdict(optimizer), **fused)


def assert_same_state(state: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Parameters, buffers and optimizer state of a program equal those of eager training, to the bit."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(state[name], value), name
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            if value is not None and p.requires_grad:
                assert torch.equal(state[f"{name}@{key}"], value), f"{name}@{key}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_twenty_steps(captured: Subject, optimizer: Optimizer) -> None:
    subject = captured.fresh()
    graphft.minimize(subject.program, optimizer)
    reference = counterpart(optimizer, subject.model.parameters())
    losses, state = subject.run()
    assert torch.equal(losses, subject.eager(reference))
    assert_same_state(state, subject.model, reference)
    assert state["global_step"] == STEPS


def clip_in_float64(parameters: list[nn.Parameter]) -> None:
    """Clips as clip_grad_norm_ does with 0.2, but the squares summed in float64."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    if norm > 0.2:
        for g in grads:
            g.mul_(0.2 / (norm + 1e-6))


def test_clipping_by_global_norm(captured: Subject) -> None:
    """Torch's own sums the squares in float32: the last digits differ."""
    subject = captured.fresh()
    graphft.minimize(subject.program, graphft.SGD(0.1), graphft.ClipByGlobalNorm(0.2))
    reference = torch.optim.SGD(subject.model.parameters(), 0.1, fused=True)
    losses, state = subject.run()
    assert torch.equal(losses, subject.eager(reference, clip=clip_in_float64))
    assert_same_state(state, subject.model, reference)


def test_parameter_groups_of_torch(mlp: Subject) -> None:
    p = dict(mlp.model.named_parameters())
    reference = torch.optim.AdamW(
        [
            {"params": [p["0.weight"], p["2.weight"]], "weight_decay": 0.1},
            {"params": [p["0.bias"]], "lr": torch.tensor(0.02), "betas": (0.8, 0.9)},
            {"params": [p["2.bias"]], "weight_decay": 0.0},
        ],
        lr=1e-2,
        fused=True,
    )
    graphft.minimize(mlp.program, reference, model=mlp.model)
    losses, state = mlp.run()
    reference.param_groups[1]["lr"] = reference.param_groups[1]["lr"].item()  # as a tensor, it is a float32
    assert torch.equal(losses, mlp.eager(reference))
    assert_same_state(state, mlp.model, reference)


def test_groups_with_schedules(mlp: Subject) -> None:
    """This is the commonest recipe for a transformer: weight decay for some, one warm-up for all."""
    p = dict(mlp.model.named_parameters())
    groups = [{"params": [p["0.weight"], p["2.weight"]], "weight_decay": 0.1}, {"params": [p["0.bias"], p["2.bias"]]}]
    reference = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, fused=True)
    curves = [graphft.schedule.linear_warmup(graphft.schedule.cosine(rate, STEPS), 5) for rate in (1e-2, 3e-3)]
    for group, curve in zip(reference.param_groups, curves, strict=True):
        group["lr"] = curve
    graphft.minimize(mlp.program, reference, model=mlp.model)
    losses, state = mlp.run()
    for group in reference.param_groups:
        group["lr"] = 0.0
    found = []
    for step in range(STEPS):
        for group, curve in zip(reference.param_groups, curves, strict=True):
            group["lr"] = float(curve(torch.tensor(float(step), dtype=torch.float64)))
        found.append(mlp.eager(reference, start=step, stop=step + 1))
    assert torch.equal(losses, torch.cat(found))
    assert_same_state(state, mlp.model, reference)


@pytest.mark.parametrize("name", ["sgd-momentum", "adam-amsgrad", "adagrad", "rmsprop-centered"])
def test_training_that_torch_began_goes_on(name: str, mlp: Subject) -> None:
    reference = counterpart(OPTIMIZERS[name], mlp.model.parameters())
    mlp.eager(reference, stop=5)
    mlp.program = graphft.build(mlp.model, mlp.loss_fn, CASES["mlp"]().inputs)
    graphft.minimize(mlp.program, reference, model=mlp.model)
    losses, state = mlp.run(start=5)
    assert torch.equal(losses, mlp.eager(reference, start=5))
    assert_same_state(state, mlp.model, reference)


class Turned(nn.Module):
    """Its weight is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


@pytest.mark.parametrize("capture", [True, False])
def test_a_transposed_parameter_trains_like_torch(capture: bool) -> None:
    """A program's is contiguous, so that its matrix products are other kernels."""
    torch.manual_seed(0)
    model = Turned()
    options = {"exact": not capture, "capture": capture}
    program = assert_trains_like_torch(model, classify, INPUTS, batches(3), sgd(2.0, 0.9), **options)
    assert program.values["w"].is_contiguous()
    assert not model.w.is_contiguous()


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("wrap", "capture"),
    [
        *((wrap, capture) for wrap in (spectral_norm, weight_norm) for capture in (True, False)),
        (parametrizations.spectral_norm, True),
        (parametrizations.weight_norm, True),
        (parametrizations.orthogonal, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_reparametrized(wrap: Any, capture: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, twin, feeds = wrapped(wrap), wrapped(wrap), batches(3)
    model(feeds[0]["x"]).sum().item()  # used before it is built
    twin.load_state_dict(model.state_dict())
    exact = wrap is not parametrizations.orthogonal  # its result has another layout
    assert_trains_like_torch(model, classify, INPUTS, feeds, twin=twin, exact=exact, capture=capture)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_parametrizations_are_not_pickled() -> None:
    with pytest.raises(GraphftError, match=r"^error\[capture\]"):
        graphft.build(wrapped(parametrizations.weight_norm), classify, INPUTS, capture=False)
