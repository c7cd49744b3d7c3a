"""Refuses what cannot be captured, with the user's line, and keeps what a capture assumed of sizes.

Tensors that would train in eager torch, but are not the model's, would be constants of the program: the loss may close
over another module, or a model keep layers in a plain list.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from graphft.capture.locations import TORCH, error_line
from graphft.capture.loss_fn import shown
from graphft.errors import GraphftError, UsageError
from graphft.ir.symbolic import Symbols, with_exact_floats

log = logging.getLogger("graphft")

_META = tuple(
    TORCH + folder
    for folder in [
        "_subclasses",
        "_meta_registrations",
        "_prims",
        "_refs",
        "_decomp",
        "fx",
        "_inductor",
        "_library",
        "_higher_order",
    ]
)
"""Torch's code for tensors without data: what it decides on sizes is about strides and errors, not about values."""

_DTYPE_WORDS = (
    "dtype",
    "scalar type",
    "same type",
    "type (",
    "tensors used as indices",
    "should be Long",
    "Type promoting",
)
"""Parts of torch's errors when labels or indices are floats, or two operands differ in dtype."""
_DTYPES = (
    "class labels and indices are integers: declare such an input with its dtype, 'y': ((None,), torch.int64); model "
    "and other inputs need one dtype: model.float()"
)

WITHOUT_CAPTURE = "graphft.build(..., capture=False) trains the module as it is, in one op"
"""The way out for what cannot be captured."""
SCRIPTED = f"give the part as it was before torch.jit.script; of an installed package: {WITHOUT_CAPTURE}"


def dtype_help(text: str) -> str:
    """The remedy for one of torch's errors about dtypes; "" for any other."""
    return _DTYPES if any(words in text for words in _DTYPE_WORDS) else ""


@contextmanager
def captured(symbols: Symbols) -> Iterator[None]:
    """Turns whatever a trace raises into GraphftError[capture] with the user's line and the remedy."""
    try:
        yield
    except GraphftError as error:
        kind = UsageError if isinstance(error, UsageError) else GraphftError
        raise kind(symbols.rename(error.message), rule=error.rule, help=error.help) from error.__cause__
    except Exception as error:
        line = error_line(error)
        text = symbols.rename(str(error).strip() or type(error).__name__).split("\n\n", 1)[0]
        what, help = _reason(error, text) or (
            f"{type(error).__name__}: {text}",
            (isinstance(error, RuntimeError) and dtype_help(text))
            or "the model runs with the named dimensions "
            + (", ".join(f"{n} (here {d.node.hint})" for n, d in symbols.dims.items()) or "(none)")
            + "; inputs that must agree in a size need the same name for it, and what the code cannot vary needs a "
            f"number; {WITHOUT_CAPTURE}",
        )
        raise GraphftError(f"{line}{': ' * bool(line)}{what}", rule="capture", help=help) from error


def _reason(error: Exception, text: str) -> tuple[str, str] | None:
    """Returns what the code does that a trace cannot follow, and the remedy; None if that is not known."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packs = any(frame.f_code.co_name in ("pack_padded_sequence", "pack_sequence") for frame in frames)
    if packs or any(isinstance(v, PackedSequence) for frame in frames for v in frame.f_locals.values()):
        return (
            "packed sequences are laid out by the values of their lengths, which a captured program does not have",
            f"mask what lies behind a sequence's end; or {WITHOUT_CAPTURE}",
        )
    if "TorchScript" in text or "torch.jit" in text:
        return f"a part of torch.jit cannot be traced ({text.splitlines()[-1]})", SCRIPTED
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return (
            "the code needs the value of a tensor, which a captured program has no place for",
            f"replace .item(), .tolist(), bool(tensor), and `if`s on tensors by torch.where; or {WITHOUT_CAPTURE}",
        )
    if isinstance(error, (DynamicOutputShapeException, UnsupportedOperatorException)):
        return (
            f"{text} gives a result whose shape depends on values",
            f"use an operation with a fixed result shape (a mask, not indexing by it); or {WITHOUT_CAPTURE}",
        )
    if ".numpy() is not supported" in text or "__format__" in text:
        return (
            "the code makes a number, a text or a NumPy array of a tensor, which has no value while it is captured",
            f"compute with torch; what is to be seen is a metric: return loss, {{'name': value}}; or {WITHOUT_CAPTURE}",
        )
    return None


def assumptions(symbols: Symbols) -> tuple[tuple[str, str], ...]:
    """Conditions on named dimensions under which the captured program holds, each with the line that decides on it.

    Raises GraphftError[dimension] if the code fixed a named dimension, or made two of them equal.
    """
    found: dict[str, str] = {}
    for name, value, line in symbols.fixed():
        raise _not_varying(name, line, "a number of it" if isinstance(value, int) else f"it equal to {value}")
    decisions = [d for d in symbols.env.decisions if not d.file.startswith(_META)]
    for decision in decisions:
        condition = symbols.named_condition(decision.expression)
        if isinstance(condition, sympy.Rel):
            condition = condition if decision.result else sympy.Not(condition)
            if condition not in (sympy.true, sympy.false):
                condition = with_exact_floats(condition)
                found.setdefault(f"{condition.lhs} {condition.rel_op} {condition.rhs}", decision.loc)
        elif names := condition.free_symbols:
            raise _not_varying(", ".join(sorted(map(str, names))), decision.loc, f"{decision.result} of {condition}")
    return tuple(found.items())


def _not_varying(name: str, line: str, what: str) -> GraphftError:
    return GraphftError(
        f"dimension {name} must vary, but {line or 'the model'} makes {what}",
        rule="dimension",
        help=f"give {name} as a number in inputs (recurrent networks need their length so), or sizes that agree "
        "the same name; or make no number of a size: x.shape[0] instead of len(x), math.trunc(x.shape[0] / 2) instead "
        f"of int(...); or {WITHOUT_CAPTURE}",
    )


# -- what loss_fn may not do --------------------------------------------------------------------------------------


def refuse_outside(loss: Tensor, own: Mapping[str, Tensor], line_of: Callable[[Any], str]) -> None:
    """Raises GraphftError[outside] if a gradient of the traced `loss` reaches a tensor from outside of the trace.

    `own` are the model's tensors by name, as they were before the trace: one of them may have been used outside of
    loss_fn. Everything that is traced has no data; what has data was made before.
    """
    reached = [(leaf, line) for leaf, line in leaves(loss, line_of) if not isinstance(leaf, FakeTensor)]
    if not reached:
        return
    tensor, line = reached[0]
    mine = next((f"parameter {name}, outside of" for name, value in own.items() if value is tensor), None)
    raise GraphftError(
        f"{line}{': ' * bool(line)}the loss depends on {mine or 'a tensor ' + shown(tensor) + ', not of'}"
        " the model that loss_fn is given: the program would hold it as a constant, and it would never train",
        rule="outside",
        help="use the model's attributes inside of loss_fn; pass one module that holds all that trains (layers in an "
        "nn.ModuleList, tensors as nn.Parameter); if it is meant to stay as it is: requires_grad_(False), detach(), or "
        "torch.no_grad()",
    )


def nodes(loss: Tensor) -> Iterator[Any]:
    """Yields the nodes of the autograd graph, each once, in the order from the loss backwards."""
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) is not None:
            yield node
            new = [following for following, _ in node.next_functions if following not in seen]
            seen.update(new)
            waiting += dict.fromkeys(new)


def leaves(loss: Tensor, line_of: Callable[[Any], str]) -> list[tuple[Tensor, str]]:
    """(leaf that gets a gradient, the user's line that uses it), each once, in the order from the loss backwards."""
    found: dict[int, tuple[Tensor, str]] = {}
    for node in nodes(loss):
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if isinstance(leaf, Tensor):
                found.setdefault(id(leaf), (leaf, line_of(node)))
    return list(found.values())


@contextmanager
def precision_watched(device: torch.device) -> Iterator[None]:
    """Raises UsageError[side-effect] if this thread scales a loss meanwhile: nothing would undo that. Warns of autocast
    for devices of another type than the model's, which the program would be without."""
    scale, cast, mine = torch.amp.GradScaler.scale, torch.autocast.__init__, threading.get_ident()

    def refuse(scaler: Any, outputs: Any) -> Any:
        if threading.get_ident() == mine and scaler.is_enabled():
            help = "leave it out; float16 needs minimize(..., grad_scaler=graphft.GradScaler()), bfloat16 none"
            raise UsageError("loss_fn scales the loss by a GradScaler", rule="side-effect", help=help)
        return scale(scaler, outputs)

    def warn(autocast: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enabled = kwargs.get("enabled", args[1] if len(args) > 1 else True)
        if threading.get_ident() == mine and enabled and device_type != device.type:
            text = (
                "torch.autocast(%r) does nothing to a model on %s: the program has no mixed precision. Build it with "
            )
            log.warning(text + "the model on the device that is to train it", device_type, device.type)
        cast(autocast, device_type, *args, **kwargs)

    torch.amp.GradScaler.scale, torch.autocast.__init__ = refuse, warn  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale, torch.autocast.__init__ = scale, cast  # type: ignore[method-assign]
