"""Programs tell the truth: every attribute of every op of ours reaches its kernel, and the port behind that."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphft.ir import Ref
from graphft.ir.registry import Attr, OpDef, own_ops
from graphft.ops import context
from graphft.ops.context import ChunkWork, Context
from tests.support.sources import sources, tree

EAGER = ("eager_step", "eager_forward")
"""They unpickle a module: its code is compared with `source` in tests/capture/test_eager.py."""
OWN = [d for d in own_ops() if d.kernel.__module__.startswith("graphft.ops.") and d.name not in EAGER]
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


PORTS = (
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
)
CASES = [pytest.param(d, a, id=f"{d.name}-{a.name}") for d in OWN for a in d.attrs]


@pytest.mark.parametrize(("definition", "attr"), CASES)
def test_a_kernel_sees_its_attribute(definition: OpDef, attr: Attr) -> None:
    given = {a.name: value(a) if a.required else a.default for a in definition.attrs} | BASE.get(definition.name, {})
    if definition.name == "squared_norms":
        given["unit"] = 1
    assert seen(definition, given) != seen(definition, given | {attr.name: another(attr, given[attr.name])})


UNUSED = {
    ("sync_comm.py", "end_push", "push_timeout"): "of async programs: a sync step waits for every shard",
    ("async_comm.py", "report", "values"): "of sync programs",
    ("sync_comm.py", "end_push", "max_skipped"): "of async programs: a sync step waits for every shard",
    ("step_check.py", "", ""): "a dry run of one step: nothing is claimed, pulled or awaited",
}
"""(file, method, parameter) that a port may leave alone, and why."""


def port_methods() -> dict[str, list[str]]:
    """Methods of all ports, with the names of their parameters."""
    protocols = [c for n, c in inspect.getmembers(context, inspect.isclass) if n.endswith("Port")]
    return {
        name: [p for p in inspect.signature(method).parameters if p != "self"]
        for protocol in protocols
        for name, method in inspect.getmembers(protocol, inspect.isfunction)
        if not name.startswith("_")
    }


def implementations() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """Methods of classes of the runtime with the name and the parameters of a port's."""
    ports = port_methods()
    for path in sources("runtime"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef) and node.name in ports:
                names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
                if names == ports[node.name] and names:
                    yield path, node


def test_a_port_uses_what_it_is_given() -> None:
    """An attribute that a kernel hands on, and nothing looks at, would be fiction as well."""
    found, unused = set(), []
    for path, method in implementations():
        found.add(method.name)
        used = {n.id for n in ast.walk(method) if isinstance(n, ast.Name)}
        abstract = any(isinstance(n, ast.Raise) and "NotImplementedError" in ast.unparse(n) for n in method.body)
        for name in port_methods()[method.name]:
            allowed = (path.name, method.name, name) in UNUSED or (path.name, "", "") in UNUSED
            if name not in used and not abstract and not allowed:
                unused.append(f"{path.name}: {method.name} does not use {name}")
    assert not unused
    with_parameters = {name for name, parameters in port_methods().items() if parameters}
    assert found >= with_parameters, "every port has an implementation in the runtime"
