"""What a script wants to be told while it waits for an epoch."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

from graphft.errors import UsageError
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.status import JobStatus

NAMES = ("on_status", "on_event", "on_epoch", "on_validation", "on_end")


ARGUMENTS = {"on_status": 1, "on_event": 1, "on_epoch": 2, "on_validation": 2, "on_end": 0}


def _check_parameters(callback: Any, name: str) -> None:
    """Raises UsageError for a method that could not be called: that would be found when an epoch is done."""
    try:
        inspect.signature(getattr(callback, name)).bind(*range(ARGUMENTS[name]))
    except TypeError as error:
        wanted = {1: "one argument", 2: "two arguments, the epoch and its metrics", 0: "none"}[ARGUMENTS[name]]
        raise UsageError(
            f"{name} of {callback!r} cannot be called: it is given {wanted} ({error})",
            rule="option",
            help=f"see graphft.runtime.driver.callbacks.Callbacks for what {name} takes",
        ) from None
    except ValueError:  # nothing is known of it
        return


class Callbacks:
    """Objects that have some of these methods, called in the script's own thread:

    on_status(status: JobStatus)         each look at the job, twice a second
    on_event(event)                      each event since the Trainer was made, once: `at`, `who`, `kind`, `text`,
                                         `fields`
    on_epoch(epoch: int, metrics: dict)  an epoch is done, and the next one has not begun
    on_validation(epoch: int, metrics: dict)
    on_end()                             `shutdown`
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
            raise UsageError(
                f"callbacks is {callbacks!r}, expected a list", rule="option", help="callbacks=[callback], also for one"
            )
        for callback in callbacks:
            known = [name for name in NAMES if callable(getattr(callback, name, None))]
            if isinstance(callback, type) or not known:
                raise UsageError(
                    f"{callback!r} is no callback: "
                    + ("it is a class" if isinstance(callback, type) else f"it has none of {', '.join(NAMES)}"),
                    rule="option",
                    help="give an object with one of these methods",
                )
            for name in known:
                _check_parameters(callback, name)
            others = [n for n in dir(callback) if n.startswith("on_") and n not in NAMES]
            if others:
                raise UsageError(
                    f"{callback!r} has {others[0]}, which nobody would call",
                    rule="option",
                    help=f"a callback's methods are {', '.join(NAMES)}",
                )
        self._callbacks = tuple(callbacks)
        self._status: JobStatus | None = None
        self._seen: set[tuple[float, str, str]] = set()
        self._since = time.time()
        """etcd keeps what earlier scripts were told."""

    def hears(self, name: str) -> bool:
        return any(hasattr(callback, name) for callback in self._callbacks)

    def tell(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                method(*arguments)

    def look(self, status: JobStatus | None) -> None:
        if status is None or status is self._status or not self._callbacks:
            return
        self._status = status
        self.tell("on_status", status)
        self.hear(status.events)

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            known = (event.at, event.who, event.text)
            if event.at >= self._since and known not in self._seen:
                self._seen.add(known)
                self.tell("on_event", event)
