"""Tensors that would train in eager torch, but are not the model's: a program would hold them as constants.

The loss may close over another module, or a model keep layers in a plain list. What gradients reach in the autograd
graph of the loss is looked at, so a tensor that is used under `no_grad()`, or detached, is no concern. And the other
way round: what the trace leaves in containers that the loss refers to.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from graphft.errors import GraphftError

log = logging.getLogger("graphft")

TOLD = 3
DEPTH, LONG = 4, 1000
"""How deep names are looked for, in the containers, objects and functions that the loss refers to; and containers with
more items are not looked into."""
LineOf = Callable[[Any], str]
"""The user's line of a node of the autograd graph; "" if it is not known."""


def refuse_outside(loss: Tensor, model: nn.Module, loss_fn: Any, own: Mapping[str, Tensor], line_of: LineOf) -> None:
    """Raises GraphftError[outside] if a gradient of `loss` reaches a tensor from outside of the trace.

    `own`: the model's tensors by name, as they were before the trace; one of them may have been used outside of
    loss_fn. Everything that is traced has no data: what has data was made before.
    """
    reached = _reached(loss, line_of)
    if not reached:
        return
    tensor, line = reached[0]
    where = f"{line}: " * bool(line)
    shape = f"{str(tensor.dtype).removeprefix('torch.')} of shape ({', '.join(map(str, tensor.shape))})"
    mine = next((name for name, value in own.items() if value is tensor), None)
    if mine is not None:
        raise GraphftError(
            f"{where}the loss uses a result that was computed from parameter {mine} outside of loss_fn; the program "
            "would hold it as a constant",
            rule="outside",
            help="compute it inside of loss_fn, or detach() it if it is meant to stay as it is",
        )
    name = next((n for n, value in _names(model, loss_fn) if value is tensor), "")
    more = f" (and {len(reached) - 1} more)" * (len(reached) > 1)
    raise GraphftError(
        f"{where}the loss depends on {name or 'a trainable tensor'}, {shape}{more}, which is no parameter of the "
        "model: the program would hold it as a constant, and it would never train",
        rule="outside",
        help="pass one module that holds both: an nn.Module with model and loss as its parts (layers in an "
        "nn.ModuleList, tensors as nn.Parameter); if it is meant to stay as it is: requires_grad_(False), or use it "
        "under torch.no_grad()",
    )


def tell_kept(model: nn.Module, loss_fn: Any) -> None:
    """Warns of tensors of the trace that were left in something that the loss or the model refers to: a list that it
    appends to, an average of its own. That happened once, when it was captured, and happens in no step."""
    names = sorted({name for name, value in _names(model, loss_fn) if isinstance(value, FakeTensor)})
    if names:
        log.warning(
            "loss_fn keeps what it computes in %s: that happens once, when it is captured, and in no step of the job; "
            "what is to last from step to step is a buffer of the model (register_buffer), what is to be recorded a "
            "metric that loss_fn returns",
            ", ".join(names[:TOLD]) + f" and {len(names) - TOLD} more" * (len(names) > TOLD),
        )


def _reached(loss: Tensor, line_of: LineOf) -> list[tuple[Tensor, str]]:
    """(leaf with data, the user's line that uses it), each leaf once, in the order from the loss backwards."""
    found: dict[int, tuple[Tensor, str]] = {}
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions if node is not None else ():
            leaf = getattr(following, "variable", None)
            if isinstance(leaf, Tensor):
                if not isinstance(leaf, FakeTensor):
                    found.setdefault(id(leaf), (leaf, line_of(node)))
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def _names(model: nn.Module, loss_fn: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the loss and the model refer to, with what they are called there."""
    yield from _inside("loss_fn", loss_fn, DEPTH)
    for path, module in model.named_modules():
        label = f"model.{path}".rstrip(".")
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training":
                yield from _inside(f"{label}.{name}", value, DEPTH)
        yield from _inside("", type(module).forward, 2)


def _inside(label: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield label, value
    elif isinstance(value, nn.Module):
        yield from ((f"{label}.{name}", parameter) for name, parameter in value.named_parameters())
    elif depth:
        for name, part in _parts(label, value):
            yield from _inside(name, part, depth - 1)


def _parts(label: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Mapping, list, tuple)) and len(value) > LONG:
        return
    if isinstance(value, Mapping):
        yield from ((f"{label}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{label}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((label, part) for part in (value.func, value.args, value.keywords))
    elif inspect.ismethod(value):
        yield from ((label, part) for part in (value.__self__, value.__func__))
    elif inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        yield from {**variables.globals, **variables.nonlocals}.items()
    elif not inspect.ismodule(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from ((f"{label}.{name}", part) for name, part in vars(value).items())
