"""What a model or `loss_fn` does beside computing: a program would leave it out, or hold it as a constant.

`loss_fn` runs once, on tensors without data. A `backward()` in it, an optimizer's step, clipping, or the scale of a
gradient scaler change nothing that a program computes, or something wrong: they are refused. A `print` is told.
"""

from __future__ import annotations

import builtins
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphft.errors import UsageError
from graphft.locations import TRACED, user_line

log = logging.getLogger("graphft")

_CLIP = "leave it out, and clip by minimize: graphft.minimize(program, optimizer, graphft.ClipByGlobalNorm(1.0)), or {}"
_HELP = {  # what is called: the remedy
    "backward": "return the loss and leave backward() out: build() appends the backward pass",
    "clip_grad_norm_": _CLIP.format("graphft.ClipByValue(limit)"),
    "clip_grad_value_": _CLIP.format("graphft.ClipByValue(limit)"),
    "step": "leave it out: graphft.minimize(program, optimizer) appends the update of the parameters",
    "scale": "leave it out: gradients would stay scaled. torch.autocast works without a scaler (bfloat16 needs none); "
    "GradScaler(enabled=False) changes nothing, and may stay",
}
_PATCHING = threading.RLock()
"""One capture at a time changes what torch's functions do, and changes it back."""


@contextmanager
def side_effects_refused() -> Iterator[None]:
    """Around a call of `loss_fn` in a trace: raises UsageError[side-effect] at what a program would lose.

    Only this thread's calls count: another may train a model meanwhile.
    """
    mine = threading.get_ident()

    def refuse(what: str, name: str) -> None:
        if threading.get_ident() == mine:
            raise _refused(what, name)

    def clipping(*callers: str) -> Callable[[Any], Any]:  # also where the caller was imported by name
        def guard(original: Any) -> Any:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                caller = sys._getframe(1).f_code.co_name
                if caller in callers:
                    refuse(f"torch.nn.utils.{caller}", caller)
                return original(*args, **kwargs)

            return guarded

        return guard

    def backward(original: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            refuse("backward()", "backward")
            return original(*args, **kwargs)

        return guarded

    def scale(original: Any) -> Any:
        def guarded(self: Any, outputs: Any) -> Any:
            if self.is_enabled():
                refuse(f"{type(self).__name__}.scale()", "scale")
            return original(self, outputs)

        return guarded

    with _PATCHING, ExitStack() as stack:
        stack.enter_context(_replaced(torch.autograd, "backward", backward))
        stack.enter_context(_replaced(torch.amp.GradScaler, "scale", scale))
        stack.enter_context(_replaced(clip_grad, "_get_total_norm", clipping("clip_grad_norm_")))
        stack.enter_context(_replaced(clip_grad, "_group_tensors_by_device_and_dtype", clipping("clip_grad_value_")))
        stack.enter_context(_replaced(builtins, "print", _telling(mine)))
        hook = register_optimizer_step_pre_hook(lambda o, *_: refuse(f"{type(o).__name__}.step()", "step"))
        stack.callback(hook.remove)
        yield


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _refused(what: str, name: str) -> UsageError:
    line = user_line(sys._getframe(1), until=TRACED)
    lost = "hold its scale as a constant factor" if name == "scale" else "leave it out"
    return UsageError(
        f"{line}{': ' * bool(line)}{what} is called while the loss is captured; the program would {lost}",
        rule="side-effect",
        help=_HELP[name],
    )


def _telling(mine: int) -> Callable[[Any], Any]:
    told: list[str] = []

    def make(original: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> None:
            line = user_line(sys._getframe(1), until=TRACED)
            if line and not told and threading.get_ident() == mine:
                told.append(line)
                log.warning(
                    "%s: print() runs once, now, while the loss is captured, and never while a job trains; to see a "
                    "value of every step, return it as a metric: return loss, {'name': value}",
                    line,
                )
            original(*args, **kwargs)

        return guarded

    return make
