"""Refuses what `loss_fn` may not do while it is traced: the program would silently compute something else.

Tensors that would train in eager torch, but are not the model's, would be constants of the program (`refuse_outside`):
the loss may close over another module, or a model keep layers in a plain list. What gradients reach in the autograd
graph of the loss is looked at, so a tensor that is used under `no_grad()`, or detached, is no concern. `backward()`
would be lost, and a gradient scaler's scale kept (`side_effects_refused`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from graphft.capture.locations import TRACED, user_line
from graphft.errors import GraphftError, UsageError

LineOf = Callable[[Any], str]
"""The user's line of a node of the autograd graph; "" if it is not known."""


def refuse_outside(loss: Tensor, own: Mapping[str, Tensor], line_of: LineOf) -> None:
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


def leaves(loss: Tensor, line_of: LineOf) -> list[tuple[Tensor, str]]:
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
