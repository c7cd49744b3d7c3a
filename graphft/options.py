"""Checks of options: errors that name those that are not there, values that are none, and devices that are missing."""

from __future__ import annotations

import difflib
import inspect
import socket
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from graphft.errors import UsageError, describe

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def is_whole(value: object, least: int) -> bool:
    """True for a number without a fraction (numpy's, too) that is at least so much."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def check_values(options: object, limits: Mapping[str, Meta] | None = None, skip: Collection[str] = ()) -> None:
    """Raises UsageError[option] for the first field of a dataclass whose value is not of its annotated type, or not
    within `limits`, by field."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        limit = (limits or {}).get(name)
        try:
            if name not in skip:
                msgspec.convert(getattr(options, name), Annotated[hint, limit] if limit is not None else hint)
        except msgspec.ValidationError as error:
            known = " or ".join(map(repr, get_args(hint))) if get_origin(hint) is Literal else ""
            text = f"{name} is {getattr(options, name)!r}: {error}"
            raise UsageError(text, rule="option", help=f"give {known}" if known else f"correct {name}") from None


def unknown_option(
    of: str, name: str, known: Collection[str], elsewhere: Mapping[str, str] | None = None
) -> UsageError:
    """`elsewhere`: what other libraries call an option -> what to do here."""
    near = difflib.get_close_matches(name, known, 2)
    meant = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
    return UsageError(f"{of} has no option {name}", rule="option", help=(elsewhere or {}).get(name, meant))


def checked_options(elsewhere: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Returns a decorator of a dataclass: it raises UsageError for an option that it does not have."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__init__ = checked_keywords(cls.__init__, cls.__name__, elsewhere)  # type: ignore[method-assign]
        return cls

    return decorate


def checked_keywords(
    function: Callable[P, R], of: str = "", elsewhere: Mapping[str, str] | None = None
) -> Callable[P, R]:
    """Returns a function that raises UsageError for a keyword that it does not have. See `unknown_option`."""
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if name not in parameters:
                raise unknown_option(of or function.__name__, name, parameters, elsewhere)
        return function(*args, **given)

    return checked


def find_device(device: str | torch.device, here: bool = True) -> None:
    """Raises UsageError[device] where there is no such device to compute on; not `here`: if no machine has one."""
    import torch

    reason = "tensors there have no data" if str(device).startswith("meta") else ""
    try:
        torch.empty(0, device=device) if here else torch.device(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = describe(error).splitlines()[0]
    if reason:
        there = f"{socket.gethostname()} with torch {torch.__version__}"
        text = f"the program is to compute on {device}, which is not on {there}: {reason}"
        raise UsageError(text, rule="device", help='device "cpu"; or run it where there is one')
