"""Notices that a dataset draws random numbers, so that it is given the same ones whenever a batch is read.

Reads ahead of use share torch's generator with the thread that trains, so they must not touch it. A `DrawWatch` stops a
read at its first draw, before the generator moves: torch's by looking at each operator that is called on this thread,
and at the functions that seed it; Python's and NumPy's by comparing their states. Such a read is made again on the
calling thread, seeded per batch.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphft.data import python_states

T = TypeVar("T")


class NeedsCallingThread(Exception):
    """A read ahead was given up: it draws random numbers, so the thread that uses the batch must wait for it."""


class _Drawn(BaseException):
    """Ends a read at its first draw. No Exception: user code that handles errors is not to handle this one."""


class DrawWatch(TorchDispatchMode):
    """`read(call)` returns what `call` returns. `drew`: it drew from a global generator, so that the result is worth
    nothing (None, if it was stopped). Draws from torch's on threads that `call` starts are not seen.

    Looking costs some microseconds for each of torch's operators.
    """

    drew = False

    def read(self, call: Callable[[], T]) -> T | None:
        before = python_states()
        watching = _watch.set(self)
        try:
            with self:
                made = call()
        except _Drawn:
            return None
        finally:
            _watch.reset(watching)
        self.drew = self.drew or before != python_states()
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The wrapper that torch puts around the method below otherwise imports torch's compiler: 1.3 s of CPU, and 60
        MB, at the start of each trainer."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_random(func) and not any(map(_is_own_generator, (*args, *kwargs.values()))):
            self.stop()
        return func(*args, **kwargs)

    def stop(self) -> None:
        self.drew = True
        raise _Drawn


_watch: contextvars.ContextVar[DrawWatch | None] = contextvars.ContextVar("watch", default=None)
"""Under which watch this thread reads."""


def _guard(name: str) -> None:
    """Has a function of torch that sets the global generator end a read that is watched. It is no operator, so the
    dispatch mode does not see it; and it would move the generator of the thread that trains."""
    original = getattr(torch, name)

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        watch = _watch.get()
        if watch is not None:
            watch.stop()
        return original(*args, **kwargs)

    setattr(torch, name, guarded)
    setattr(torch.random, name, guarded)


for _name in ("manual_seed", "seed", "set_rng_state"):
    _guard(_name)


@functools.cache
def _is_random(func: Any) -> bool:
    """Not all of them have the tag; those that take a generator draw from one."""
    return torch.Tag.nondeterministic_seeded in func.tags or any(
        argument.name == "generator" for argument in func._schema.arguments
    )


def _is_own_generator(value: Any) -> bool:
    """True for a generator but the global one, for which there may be several Python objects."""
    return isinstance(value, torch.Generator) and value._cdata != torch.default_generator._cdata  # type: ignore[attr-defined]
