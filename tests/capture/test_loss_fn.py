"""`loss_fn` has inputs by name, results, no side effects, and no trainable tensors that are not the model's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.capture.loss_fn import reported
from graphft.errors import GraphftError
from graphft.ir import Kind
from graphft.transpiler.job import Job

LABELS = {"x": (None, 8), "y": ((None,), torch.int64)}


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def looked_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.embedding(y, model.weight).mean()


def formatted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = classify(model, x, y)
    model.note = f"{loss:.3f}"
    return loss


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def build(
    loss_fn: Any = classify, inputs: Any = LABELS, model: nn.Module | None = None, **more: Any
) -> graphft.Program:
    return graphft.build(model or nn.Linear(8, 3), loss_fn, inputs, **more)


def refused(rule: str, *arguments: Any, **options: Any) -> GraphftError:
    with pytest.raises(GraphftError) as caught:
        build(*arguments, **options)
    assert caught.value.rule == rule
    assert caught.value.help
    return caught.value


# -- inputs -------------------------------------------------------------------------------------------------------


def test_inputs_are_passed_by_name() -> None:
    refused("inputs", classify, {"x": (None, 8), "target": ((None,), torch.int64)})
    build(lambda model, **given: classify(model, **given))
    build(nn.CrossEntropyLoss(), targets=["y"])


OLD_TORCH = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="torch finds it only when it runs"
)


@pytest.mark.parametrize("loss_fn", [classify, pytest.param(looked_up, marks=OLD_TORCH)])
def test_labels_and_indices_are_integers(loss_fn: Any) -> None:
    error = refused("capture", loss_fn, {"x": (None, 8), "y": (None,)})
    assert f"test_loss_fn.py:{loss_fn.__code__.co_firstlineno + 1} in {loss_fn.__name__}" in error.message
    assert "'y': ((None,), torch.int64)" in error.help


def test_a_value_cannot_be_formatted() -> None:
    assert "return loss, {" in refused("capture", formatted).help


# -- results ------------------------------------------------------------------------------------------------------


def with_extras(extras: Callable[[Tensor, Tensor], Any]) -> Any:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return F.cross_entropy(logits, y), extras(logits, y)

    return loss_fn


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y).float().mean()


def transpile(program: graphft.Program) -> Job:
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=torch.zeros(32, 8), y=torch.zeros(32, dtype=torch.int64), chunk_size=16)
    return graphft.transpile(program, data=data, batch_size=8)


def test_an_executor_fetches_them_and_a_trainer_reports_floats() -> None:
    program = build(with_extras(lambda logits, y: {"accuracy": accuracy(logits, y), "logits": logits}))
    x, y = torch.randn(5, 8), torch.randint(3, (5,))
    out = graphft.Executor().run(program, {"x": x, "y": y}, ["loss", "accuracy", "logits"])
    assert torch.equal(F.cross_entropy(out["logits"], y), out["loss"])
    assert torch.equal(accuracy(out["logits"], y), out["accuracy"])
    with pytest.raises(GraphftError, match=r"^error\[metrics\]"):
        transpile(program)
    job = transpile(build(with_extras(lambda logits, y: {"a": accuracy(logits, y), "b": accuracy(logits, y)})))
    assert reported(job.trainer_program()) == ("loss", "a", "b")


@pytest.mark.parametrize(
    "extras",
    [
        accuracy,
        lambda logits, y: {"lr": 0.1},
        lambda logits, y: {"top 5": accuracy(logits, y)},
        lambda logits, y: {7: accuracy(logits, y)},
        lambda logits, y: {"loss": accuracy(logits, y)},
        lambda logits, y: {"y": accuracy(logits, y)},
        lambda logits, y: {"weight": accuracy(logits, y)},
    ],
)
def test_results_that_are_refused(extras: Callable[[Tensor, Tensor], Any]) -> None:
    refused("loss", with_extras(extras))


def affecting(effect: Callable[[nn.Module, Tensor], Any]) -> Any:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        effect(model, loss)
        return loss

    return loss_fn


@pytest.mark.parametrize(
    "effect",
    [
        lambda model, loss: loss.backward(),
        lambda model, loss: torch.autograd.backward(loss, retain_graph=True),
        lambda model, loss: torch.amp.GradScaler("cpu").scale(loss),
    ],
)
def test_side_effects_are_refused(effect: Callable[[nn.Module, Tensor], Any]) -> None:
    refused("side-effect", affecting(effect))


# -- tensors that are not the model's -----------------------------------------------------------------------------

HEAD = nn.Linear(4, 2)
SCALE = torch.ones(4, requires_grad=True)


class Listed(nn.Module):
    """Its second layer is in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(8, 4), [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.rest[0](self.first(x))


def by_global(model: nn.Module, x: Tensor) -> Tensor:
    return HEAD(model(x)).square().mean()


def by_tensor(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * SCALE).mean()


def with_head(head: nn.Module, model: nn.Module, x: Tensor) -> Tensor:
    return head(model(x)).square().mean()


@pytest.mark.parametrize(
    ("model", "loss_fn", "code"),
    [
        (nn.Linear(8, 4), by_global, by_global),
        (nn.Linear(8, 4), by_tensor, by_tensor),
        (nn.Linear(8, 4), functools.partial(with_head, nn.Linear(4, 2)), with_head),
        (nn.Linear(8, 4), lambda model, x: HEAD(model(x).detach()).mean(), None),
        (Listed(), plain, Listed.forward),
    ],
    ids=["global", "tensor", "partial", "only-it", "list"],
)
def test_trainable_tensors_from_outside(model: nn.Module, loss_fn: Any, code: Any) -> None:
    error = refused("outside", loss_fn, {"x": (None, 8)}, model)
    if code is not None:
        assert f"test_loss_fn.py:{code.__code__.co_firstlineno + 1} in {code.__name__}" in error.message


def test_what_is_meant_to_stay_is_a_constant() -> None:
    teacher = nn.Linear(8, 4)

    losses = [
        lambda model, x: (model(x) - torch.no_grad()(teacher)(x)).square().mean(),
        lambda model, x: (model(x) - teacher(x).detach()).square().mean(),
        lambda model, x: (model(x) - teacher(x)).square().mean(),
    ]
    for loss_fn in losses:
        teacher.requires_grad_(loss_fn is not losses[-1])
        program = build(loss_fn, {"x": (None, 8)}, nn.Linear(8, 4))
        assert [v.type.shape for v in program.of_kind(Kind.CONST)] == [(4, 8), (4,)]


# -- what is told: a loss that is a sum over the batch ---------------------------------------------------------------

EACH = {"reduction": "none"}
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])
Loss = Callable[[Tensor, Tensor, Tensor], Any]


def warnings_of(loss: Loss, caplog: pytest.LogCaptureFixture, y: Tensor, classes: int = 3) -> list[str]:
    """Returns the warnings of `transpile` for a loss_fn that gives loss(output, y, z)."""
    torch.manual_seed(1)
    program = graphft.build(
        nn.Linear(8, classes),
        lambda model, x, y, z: loss(model(x), y, z),
        {"x": (None, 8), "y": ((None,), y.dtype), "z": (None, 3)},
    )
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=torch.randn(8, 8), y=y, z=torch.randn(8, 3), chunk_size=8)
    with caplog.at_level(logging.WARNING):
        graphft.transpile(program, data=data, batch_size=8)
    return [r.getMessage() for r in caplog.records if "batch" in r.getMessage()]


CLASSES = torch.tensor([0, 2, 1, 1, 2, 0, 2, 1])


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, z: F.cross_entropy(out, y, reduction="sum"),
        lambda out, y, z: -2 * F.cross_entropy(out, y, **EACH).sum(),
        lambda out, y, z: F.cross_entropy(out, y) + 0.1 * (out - z).square().sum(),
    ],
)
def test_a_sum_is_told(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings_of(loss, caplog, CLASSES)
    assert "the loss is a sum over the batch" in told


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y, z: F.cross_entropy(out, y),
        lambda out, y, z: F.cross_entropy(out, y, weight=WEIGHTS),
        lambda out, y, z: F.cross_entropy(out, y, reduction="sum") / out.shape[0],
        lambda out, y, z: (F.cross_entropy(out, y, **EACH) * (y > 0)).sum() / (y > 0).sum(),
        lambda out, y, z: F.cross_entropy(out @ z.T, torch.arange(y.shape[0])),  # of a batch, and no sum
    ],
)
def test_a_mean_is_not(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(loss, caplog, CLASSES) == []


def test_autocast_for_another_device_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).sum()

    graphft.build(nn.Linear(3, 2), loss_fn, {"x": (None, 3)})
    assert "torch.autocast('cuda') does nothing to a model on cpu" in caplog.text
