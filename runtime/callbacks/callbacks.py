"""The objects that a script gives as `callbacks=`: what they may have, whether they do, and how they are called."""

from __future__ import annotations

import importlib.util
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
    "on_validation": ("the epoch (or step)", "its metrics"),
    "on_end": (),
}
NAMES = tuple(ARGUMENTS)
OF_A_LAUNCH = tuple(name for name in NAMES if name != "on_validation")
"""What `job.run` calls of a job that is not validated."""


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
        if job.config.validate is not None:
            every, records = job.config.validate.every, job.config.validate.data.records
            options["validate"] = {"every": every or "epoch", "records": records}
        return Run(job.config.name, job.run_id, folder, options)


def check_library(name: str, callback: str) -> None:
    """Raises UsageError if it is not installed. It is loaded when the callback is first told something."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(
            f"callback {callback} needs the package {name}", rule="callbacks", help=f'pip install "graphft[{name}]"'
        )


def _check_parameters(callback: Any, name: str) -> None:
    """Raises UsageError for a method that could not be called: that would be found when an epoch is done."""
    method = getattr(callback, name)
    if inspect.iscoroutinefunction(method):
        raise UsageError(
            f"{name} of {callback!r} is a coroutine, which nobody would await",
            rule="option",
            help="make it a plain method; asyncio.run(...) in it runs a coroutine",
        )
    try:
        inspect.signature(method).bind(*ARGUMENTS[name])
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


def _held(callback: Any, told: tuple[int, int]) -> Sequence[int]:
    """What it has, if it says so."""
    found = callback.held() if hasattr(callback, "held") else told
    if not isinstance(found, Sequence) or len(found) != 2 or not all(isinstance(number, int) for number in found):
        raise UsageError(
            f"held() of {callback!r} returned {found!r}, expected (step, epoch)",
            rule="callbacks",
            help="return the step before which it has all, and how many epochs it has",
        )
    return found


class Callbacks:
    """Objects that have some of these methods, called in the script's own thread:

    on_begin(run: Run)                   before anything else, in each script
    on_status(status: JobStatus)         each look at the job, twice a second
    on_step(step: int, metrics: dict)    each step once, in order: the loss and what `loss_fn` returned beside it, means
                                         over the samples of all slots
    on_event(event)                      each event since the script began, once: `at`, `who`, `kind`, `text`, `fields`
    on_epoch(epoch: int, metrics: dict)  an epoch is done, and its steps are told
    on_validation(epoch: int, metrics: dict)   a validation is over, each once, in order; of `transpile(validate=)`
                                         with `every` so many steps: the step
    on_end()                             the run's processes have ended, in order
    flush()                              what was told of steps and epochs is to be kept: it is noted as told after this
    held() -> (step, epoch)              after on_begin: it has the steps before this one, and so many epochs. What was
                                         told and it does not have (a machine went down, it is new) is told again
    """

    def __init__(self, callbacks: Sequence[Any] | None, called: Sequence[str] = NAMES) -> None:
        callbacks = () if callbacks is None else callbacks
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
        self._at = [[0, 0, 0] for _ in callbacks]
        """Of each: it was told the steps before this one, so many epochs, and the validations until this one."""
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

    def begin(self, run: Run, told: tuple[int, int, int]) -> None:
        """`told`: (step, epoch, validation), up to which earlier scripts' callbacks were told. Who says what it holds
        knows a validation that it has."""
        self.tell("on_begin", run)
        self._at = [
            [*map(min, told[:2], _held(one, told[:2])), 0 if hasattr(one, "held") else told[2]]
            for one in self._callbacks
        ]

    def go_on(self, told: tuple[int, int, int]) -> None:
        """Another script may have told more meanwhile."""
        self._at = [list(map(max, told, at)) for at in self._at]

    @property
    def at_step(self) -> int | None:
        """From which step on somebody is to be told; None: nobody hears of steps."""
        return min((at[0] for _, at in self._hearing("on_step")), default=None)

    @property
    def at_epoch(self) -> int | None:
        """How many epochs everybody was told of; None: nobody hears of them."""
        return min((at[1] for _, at in self._hearing("on_epoch")), default=None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tells those who were not told of it."""
        for callback, at in self._hearing("on_step"):
            if at[0] <= step:
                callback.on_step(step, dict(metrics))
                at[0] = step + 1

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Tells those who were not told of it."""
        for callback, at in self._hearing("on_epoch"):
            if at[1] < epoch:
                callback.on_epoch(epoch, dict(metrics))
                at[1] = epoch

    def validation(self, number: int, metrics: Mapping[str, float]) -> None:
        """Tells those who were not told of it. `number`: the epoch, or step."""
        for callback, at in self._hearing("on_validation"):
            if at[2] < number:
                callback.on_validation(number, dict(metrics))
                at[2] = number

    def _hearing(self, name: str) -> list[tuple[Any, list[int]]]:
        return [
            (one, at) for one, at in zip(self._callbacks, self._at, strict=True) if callable(getattr(one, name, None))
        ]

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
