"""What a new user writes wrong about inputs and values, and the words that lead on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.errors import GraphftError, UsageError

LABELS = {"x": (None, 8), "y": ((None,), torch.int64)}


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def formatted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = classify(model, x, y)
    model.note = f"{loss:.3f}"
    return loss


def counted(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss = classify(model, x, y)
    return loss, {"a": loss.item()}


def looked_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.embedding(y, model.weight).mean()


def picked(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model.weight[y].mean()


def build(inputs: Any, loss_fn: Any = classify, **options: Any) -> graphft.Program:
    return graphft.build(nn.Linear(8, 3), loss_fn, inputs, **options)


@pytest.mark.parametrize("name", ["target", "model"])
def test_inputs_are_passed_by_name(name: str) -> None:
    words = rf"loss_fn\(model: .*, x: .*, y: .*\) .* cannot be called as loss_fn\(model, x=x, {name}={name}\): "
    with pytest.raises(UsageError, match=words) as caught:
        build({"x": (None, 8), name: ((None,), torch.int64)})
    assert caught.value.rule == "inputs"
    assert "passed by name" in caught.value.help


def test_other_callables_are_called_as_they_are() -> None:
    build(LABELS, lambda model, **given: classify(model, **given))
    build(LABELS, nn.CrossEntropyLoss(), targets=["y"])


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("int64", r"'int64' is a str, expected a torch.dtype\nhelp: write \(\(None,\), torch.int64\)"),
        ("float16", r"'float16' is a str, .*\nhelp: write \(\(None,\), torch.float16\)"),
        (int, r"<class 'int'> is a type, .*\nhelp: write \(\(None,\), torch.int64\)"),
    ],
)
def test_a_dtype_is_torchs(dtype: Any, words: str) -> None:
    with pytest.raises(GraphftError, match=rf"input 'y': {words}"):
        build({"x": (None, 8), "y": ((None,), dtype)})


@pytest.mark.parametrize("loss_fn", [classify, looked_up, picked])
def test_labels_and_indices_are_integers(loss_fn: Any) -> None:
    with pytest.raises(GraphftError, match=rf"test_inputs\.py:\d+ in {loss_fn.__name__}") as caught:
        build({"x": (None, 8), "y": (None,)}, loss_fn)
    assert caught.value.help.endswith("'y': ((None,), torch.int64)")


def test_a_value_cannot_be_formatted() -> None:
    with pytest.raises(GraphftError, match="in formatted: ") as caught:
        build(LABELS, formatted)
    assert caught.value.rule == "capture"
    assert "return loss, {" in caught.value.help


def test_a_metric_as_a_number() -> None:
    with pytest.raises(GraphftError, match="returns 'a' as a Python number, expected a tensor") as caught:
        build(LABELS, counted)
    assert "leave out float() and .item()" in caught.value.help
