"""Options: errors that name those that are not there, and values that are none."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from numbers import Integral
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from graphft.errors import UsageError

T = TypeVar("T")
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
    """A dataclass whose constructor raises UsageError for an option that it does not have. See `unknown_option`."""

    def decorate(cls: type[T]) -> type[T]:
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        init = cls.__init__

        @wraps(init)
        def checked(self: T, *args: Any, **options: Any) -> None:
            for name in options:
                if name not in known:
                    raise unknown_option(cls.__name__, name, known, elsewhere)
            init(self, *args, **options)

        cls.__init__ = checked  # type: ignore[assignment, method-assign]
        return cls

    return decorate


def checked_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """A function that raises UsageError for a keyword that it does not have. See `unknown_option`."""
    parameters = inspect.signature(function).parameters
    options = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> T:
        for name in given:
            if name not in parameters:
                raise unknown_option(function.__name__, name, options)
        return function(*args, **given)

    return checked
