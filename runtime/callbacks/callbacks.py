"""The objects that a script gives as `callbacks=`: what they may have, whether they do, and how they are called."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.status import JobStatus

if TYPE_CHECKING:
    from graphft.transpiler import Job

ARGUMENTS = {
    "on_begin": ("the run",),
    "on_status": ("the status",),
    "on_step": ("the step", "its metrics"),
    "on_event": ("the event",),
    "on_epoch": ("the epoch", "its metrics"),
    "on_validation": ("the epoch", "its metrics"),
    "on_end": (),
}
NAMES = tuple(ARGUMENTS)
OF_A_LAUNCH = tuple(name for name in NAMES if name != "on_validation")
"""What `job.run` calls: nobody validates there."""


@dataclass(frozen=True)
class Run:
    """What a callback is told of. `config`: the job's options, for people; `folder`: the run's, which is there."""

    name: str
    id: str
    folder: Path
    config: Mapping[str, Any]

    @staticmethod
    def of(job: Job, folder: Path) -> Run:
        options = job.config.to_json()
        data = options.pop("data")
        options |= {"data": data["kind"], "records": job.config.data.records}
        return Run(job.config.name, job.run_id, folder, options)


def _check_parameters(callback: Any, name: str) -> None:
    """Raises UsageError for a method that could not be called: that would be found when an epoch is done."""
    try:
        inspect.signature(getattr(callback, name)).bind(*ARGUMENTS[name])
    except TypeError as error:
        count = ("no argument", "one argument, ", "two arguments, ")[len(ARGUMENTS[name])]
        wanted = count + " and ".join(ARGUMENTS[name])
        raise UsageError(
            f"{name} of {callback!r} cannot be called: it is given {wanted} ({error})",
            rule="option",
            help=f"see graphft.runtime.callbacks.callbacks.Callbacks for what {name} takes",
        ) from None
    except ValueError:  # nothing is known of it
        return


class Callbacks:
    """Objects that have some of these methods, called in the script's own thread:

    on_begin(run: Run)                   before anything else, in each script
    on_status(status: JobStatus)         each look at the job, twice a second
    on_step(step: int, metrics: dict)    each step once, in order: the loss and what `loss_fn` returned beside it, means
                                         over the samples of all slots
    on_event(event)                      each event since the script began, once: `at`, `who`, `kind`, `text`, `fields`
    on_epoch(epoch: int, metrics: dict)  an epoch is done, and its steps are told
    on_validation(epoch: int, metrics: dict)
    on_end()                             the run's processes have ended, in order
    flush()                              what was told of steps and epochs is to be kept: it is noted as told after this
    """

    def __init__(self, callbacks: Sequence[Any], called: Sequence[str] = NAMES) -> None:
        if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
            raise UsageError(
                f"callbacks is {callbacks!r}, expected a list", rule="option", help="callbacks=[callback], also for one"
            )
        for callback in callbacks:
            known = [name for name in NAMES if callable(getattr(callback, name, None))]
            if isinstance(callback, type) or not {*known} & {*called}:
                raise UsageError(
                    f"{callback!r} is no callback: "
                    + ("it is a class" if isinstance(callback, type) else f"it has none of {', '.join(called)}"),
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

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def hears(self, *names: str) -> bool:
        """Whether one of them has one of these methods."""
        return any(callable(getattr(callback, name, None)) for callback in self._callbacks for name in names)

    def tell(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                method(*arguments)

    def is_new(self, status: JobStatus) -> bool:
        """Whether it is not told so far, and somebody is there to hear of it."""
        return bool(self._callbacks) and status is not self._status

    def look(self, status: JobStatus) -> None:
        """Tells of a status, and of its events."""
        self._status = status
        self.tell("on_status", status)
        self.hear(status.events)

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            known = (event.at, event.who, event.text)
            if event.at >= self._since and known not in self._seen:
                self._seen.add(known)
                self.tell("on_event", event)
