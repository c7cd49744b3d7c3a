"""Refuses `backward()` and a gradient scaler in `loss_fn`: a program would lose the one, and keep the other's scale."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphft.errors import UsageError
from graphft.locations import TRACED, user_line

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
