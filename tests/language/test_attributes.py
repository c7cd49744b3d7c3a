"""Programs tell the truth: every attribute of every op of ours reaches its kernel, and the port behind that."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs.reference import ops_page
from graphft.ir import Ref
from graphft.ir.registry import Attr, OpDef, own_ops
from graphft.ops.context import ChunkWork, Context

EAGER = ("eager_step", "eager_forward")
"""They unpickle a module: its code is compared with `source` in tests/capture/test_eager.py."""
OPS = [d for d in own_ops() if d.kernel.__module__.startswith("graphft.ops.")]
OWN = [d for d in OPS if d.name not in EAGER]
UNIT = ChunkWork(0, 0, 0, 4, seed=1)


class Port:
    """Any port. Writes down what it is called with, and answers with something that kernels can go on with."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **attrs: Any) -> Any:
            self.calls.append((name, [a for a in args if not isinstance(a, Tensor)], attrs))
            return [torch.zeros(1)] if name in ("batch", "weights") else UNIT

        return call


def vector(*values: float) -> Tensor:
    return torch.tensor(values or (0.5, -2.0, 3.0))


def operands(definition: OpDef, attrs: dict[str, Any]) -> list[Any]:
    """Something for each slot, so that no attribute's effect is hidden by zeros. State is there if the options ask."""
    special: dict[str, Callable[[], Any]] = {
        "lr": lambda: torch.tensor(0.1, dtype=torch.float64),
        "step": lambda: torch.tensor(3.0),
        "sqnorm": lambda: torch.tensor([1e6], dtype=torch.float64),
        "chunk": lambda: UNIT,
        "unit": lambda: UNIT,
        "variables": lambda: Ref("x"),
        "exp_avg_sq": lambda: vector(0.3, 0.2, 0.1),
        "square_avg": lambda: vector(0.3, 0.2, 0.1),
        "square_sum": lambda: vector(0.3, 0.2, 0.1),
        "max_exp_avg_sq": lambda: vector(5.0, 6.0, 7.0),
        "mean_square": lambda: vector(0.3, 0.2, 0.1),
        "scale": lambda: torch.tensor([4.0]),
        "growth_tracker": lambda: torch.tensor([1], dtype=torch.int32),
        "backup": lambda: vector(1.0, 1.0, 1.0),
    }
    there = [s for s in definition.slots if s.name != "max_exp_avg_sq" or attrs["amsgrad"]]
    made = [special.get(slot.name, vector)() for slot in there]
    if definition.name == "sgd":
        return [*made[:3], vector(1.0, 2.0, 3.0), torch.tensor(3.0)]  # momentum_buffer, step
    if definition.name == "rmsprop":
        return [*made[:5], vector(0.1, 0.1, 0.1), vector(0.1, 0.1, 0.1)]
    return made


BASE: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "rmsprop": {"momentum": 0.9},
    "adagrad": {"lr_decay": 0.1},
    "adam": {"eps": 0.1},
    "adamw": {"eps": 0.1},
    "update_scale": {"growth_factor": 2.0},
}
"""Values at which the other attributes show."""


def value(attr: Attr) -> Any:
    """A value for an attribute that must be given."""
    origin, params = typing.get_origin(attr.type), typing.get_args(attr.type)
    if origin is tuple:
        return ((0, 1),) if params[0] not in (str, float) else ("a",)
    return {int: 2, float: 0.25, bool: False, str: "name"}[attr.type]


def another(attr: Attr, before: Any) -> Any:
    """Another value of the attribute's type."""
    if typing.get_origin(attr.type) is typing.Literal:
        return next(v for v in typing.get_args(attr.type) if v != before)
    if isinstance(before, bool):
        return not before
    if isinstance(before, (int, str)):
        return before + (1 if isinstance(before, int) else "2")
    if isinstance(before, float):
        return before / 2 + 0.1
    if not before:
        return ("a",)
    return (*before, before[0]) if attr.type != tuple[float, float] else (0.5, 0.6)


def seen(definition: OpDef, attrs: dict[str, Any]) -> str:
    """Everything that comes of running the kernel once: calls of ports, results, operands afterwards."""
    calls: list[Any] = []
    ports = {name: Port(calls) for name in PORTS}
    given = operands(definition, attrs)
    result = definition.kernel(Context(**ports), *given, **attrs)
    values = (*given, *(result if isinstance(result, (list, tuple)) else [result]))
    return repr([calls, [v.tolist() if isinstance(v, Tensor) else v for v in values]])


PORTS = [
    "coordinator",
    "task_server",
    "session",
    "view",
    "slots",
    "queue",
    "claims",
    "comm",
    "data",
    "local",
    "server",
    "validation",
]
CASES = [pytest.param(d, a, id=f"{d.name}-{a.name}") for d in OWN for a in d.attrs]


@pytest.mark.parametrize(("definition", "attr"), CASES)
def test_a_kernel_sees_its_attribute(definition: OpDef, attr: Attr) -> None:
    given = {a.name: value(a) if a.required else a.default for a in definition.attrs} | BASE.get(definition.name, {})
    if definition.name == "squared_norms":
        given["unit"] = 1
    if attr.name == "backoff_factor":
        given["found_inf"] = True
    assert seen(definition, given) != seen(definition, given | {attr.name: another(attr, given[attr.name])})


def test_every_own_op_is_documented() -> None:
    page = ops_page()
    assert {"send", "recv", "etcd_get_chunk", "listen_and_serv", "sgd", "adam"} <= {d.name for d in OPS}
    for definition in OPS:
        assert f"### `{definition.name}`" in page
        assert definition.doc, f"{definition.name} has no docstring"


def test_the_page_is_up_to_date() -> None:
    assert ops_page() == (Path(__file__).parents[2] / "docs" / "ops.md").read_text(), "make docs"
