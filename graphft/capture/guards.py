"""Refuses what cannot be captured, with the user's line, and keeps what a capture assumed of sizes.

Tensors that would train in eager torch, but are not the model's, would be constants of the program (`refuse_outside`):
the loss may close over another module, or a model keep layers in a plain list. Gradients do not reach a tensor that is
used under `no_grad()`, or detached. `backward()` would be lost, and a gradient scaler's scale kept
(`side_effects_refused`).
"""

from __future__ import annotations

import sys
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

from graphft.capture.locations import TORCH, TRACED, error_line, user_line
from graphft.errors import GraphftError, UsageError
from graphft.ir.symbolic import Symbols

_META = tuple(
    TORCH + d
    for d in (
        "_subclasses",
        "_meta_registrations",
        "_prims",
        "_refs",
        "_decomp",
        "fx",
        "_inductor",
        "_library",
        "_higher_order",
    )
)
"""Torch's code for tensors without data: what it decides on sizes is about strides and errors, not about values."""

_DATA_DEPENDENT = (DataDependentOutputException, GuardOnDataDependentSymNode)

_DTYPE_WORDS = (
    "dtype",
    "scalar type",
    "same type",
    "type (",
    "tensors used as indices",
    "should be Long",
    "Type promoting",
)
"""Of torch's errors when labels or indices are floats, or two operands differ in dtype."""
_DTYPES = (
    "class labels and indices are integers: declare such an input with its dtype, 'y': ((None,), torch.int64); model "
    "and other inputs need one dtype: model.float()"
)


WITHOUT_CAPTURE = "graphft.build(..., capture=False) trains the module as it is, in one op"
"""The way out for what cannot be captured."""
SCRIPTED = f"give the part as it was before torch.jit.script; or {WITHOUT_CAPTURE}"


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
    if isinstance(error, _DATA_DEPENDENT):
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
        line = line or "the model"
        if isinstance(value, int):  # the example size, which says nothing to the user
            raise GraphftError(
                f"dimension {name} must vary, but {line} makes a number of it",
                rule="dimension",
                help=f"give {name} as a number in inputs (recurrent networks need their length so), or do not make a "
                f"number of a size there (x.shape[0] instead of len(x), for one); or {WITHOUT_CAPTURE}",
            )
        raise GraphftError(
            f"dimension {name} must vary, but {line} makes it equal to {value}",
            rule="dimension",
            help=f"give both sizes the same name in inputs, if they always agree: {value}",
        )
    decisions = [d for d in symbols.env.decisions if not d.file.startswith(_META)]
    for decision in decisions:
        condition = symbols.named_condition(decision.expression)
        if isinstance(condition, sympy.Rel):
            condition = condition if decision.result else sympy.Not(condition)
            if condition not in (sympy.true, sympy.false):
                found.setdefault(f"{condition.lhs} {condition.rel_op} {condition.rhs}", decision.loc)
    return tuple(found.items())


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
    where = f"{line}: " * bool(line)
    mine = next((name for name, value in own.items() if value is tensor), None)
    if mine is not None:
        raise GraphftError(
            f"{where}the loss uses parameter {mine}, or a result computed from it, outside of the model that loss_fn "
            "is given; the program would hold it as a constant",
            rule="outside",
            help="compute it inside of loss_fn, of the model's attributes; or detach() it if it is meant to stay as it "
            "is",
        )
    more = f" (and {len(reached) - 1} more)" * (len(reached) > 1)
    raise GraphftError(
        f"{where}the loss depends on a trainable tensor, {describe_tensor(tensor)}{more}, which is no parameter of the "
        "model: the program would hold it as a constant, and it would never train",
        rule="outside",
        help="pass one module that holds both: an nn.Module with model and loss as its parts (layers in an "
        "nn.ModuleList, tensors as nn.Parameter); if it is meant to stay as it is: requires_grad_(False), or use it "
        "under torch.no_grad()",
    )


def describe_tensor(tensor: Tensor) -> str:
    """Dtype and shape in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape ({', '.join(map(str, tensor.shape))})"


def leaves(loss: Tensor, line_of: Callable[[Any], str]) -> list[tuple[Tensor, str]]:
    """(leaf that gets a gradient, the user's line that uses it), each once, in the order from the loss backwards."""
    found: dict[int, tuple[Tensor, str]] = {}
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions if node is not None else ():
            leaf = getattr(following, "variable", None)
            if isinstance(leaf, Tensor):
                found.setdefault(id(leaf), (leaf, line_of(node)))
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


_HELP = {
    "backward": "return the loss and leave backward(), clipping and the optimizer's step out: build() and minimize() "
    "append them, clipping as graphft.minimize(program, optimizer, graphft.ClipByGlobalNorm(1.0))",
    "scale": "leave it out: gradients would stay scaled. torch.autocast works without a scaler (bfloat16 needs none); "
    "GradScaler(enabled=False) changes nothing, and may stay",
}
_PATCHING = threading.RLock()
"""One capture at a time changes what torch's functions do, and changes it back."""


@contextmanager
def side_effects_refused() -> Iterator[None]:
    """Raises UsageError[side-effect] at such a call of this thread; another may train a model meanwhile."""
    mine, backward, scale = threading.get_ident(), torch.autograd.backward, torch.amp.GradScaler.scale

    def refuse(name: str) -> None:
        if threading.get_ident() == mine:
            line = user_line(sys._getframe(2), until=TRACED)
            what = f"{line}{': ' * bool(line)}{name}() is called while the loss is computed"
            raise UsageError(what, rule="side-effect", help=_HELP[name])

    def no_backward(*args: Any, **kwargs: Any) -> Any:
        refuse("backward")
        return backward(*args, **kwargs)

    def no_scale(self: Any, outputs: Any) -> Any:
        if self.is_enabled():
            refuse("scale")
        return scale(self, outputs)

    with _PATCHING:
        torch.autograd.backward, torch.amp.GradScaler.scale = no_backward, no_scale  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autograd.backward, torch.amp.GradScaler.scale = backward, scale  # type: ignore[method-assign]
