"""Noticing that a dataset draws random numbers, and giving it the same ones whenever a batch is read.

Reads ahead of use share torch's generator with the thread that trains, so they must not touch it. A `DrawWatch` stops a
read at its first draw, before the generator moves: torch's by looking at each operator that is called on this thread,
and at the functions that seed it; Python's and NumPy's by comparing their states. Such a read is made again on the
calling thread, seeded per batch.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphft.data_seeding import python_states

T = TypeVar("T")


class NeedsCallingThread(Exception):
    """A read ahead was given up: it draws random numbers, so the thread that uses the batch must wait for it."""


class _Drawn(BaseException):
    """Ends a read at its first draw. No Exception: user code that handles errors is not to handle this one."""


class DrawWatch(TorchDispatchMode):
    """`read(call)` returns what `call` returns. `drew`: whether it drew from a global generator, so that the result is
    worth nothing (None, if it was stopped). Draws from torch's on threads that `call` starts are not seen.

    `operators`: whether torch's operators are looked at, which costs some microseconds each.
    """

    def __init__(self, operators: bool = True) -> None:
        super().__init__()
        self.drew, self._operators = False, operators

    def read(self, call: Callable[[], T]) -> T | None:
        before = python_states()
        watching = _watch.set(self)
        try:
            with self if self._operators else contextlib.nullcontext():
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
        if _is_random(func) and not _has_own_generator((*args, *kwargs.values())):
            self.drew = True
            raise _Drawn
        return func(*args, **kwargs)


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
            watch.drew = True
            raise _Drawn
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


def _has_own_generator(values: tuple[Any, ...]) -> bool:
    mine = _identity(torch.default_generator)
    return any(isinstance(v, torch.Generator) and _identity(v) != mine for v in values)


def _identity(generator: Any) -> Any:
    """Of one generator there may be several Python objects."""
    return generator._cdata
