"""The objects that a script gives as `callbacks=`: which methods they may have, and the base of the ready-made ones."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

ARGUMENTS = {
    "on_begin": ("run",),
    "on_status": ("status",),
    "on_step": ("step", "metrics"),
    "on_event": ("event",),
    "on_epoch": ("epoch", "metrics"),
    "on_validation": ("epoch", "metrics"),
    "on_end": (),
}
NAMES = tuple(ARGUMENTS)
OF_A_LAUNCH = tuple(name for name in NAMES if name != "on_validation")
"""The methods that `job.run` calls for a job without validation."""


@dataclass(frozen=True)
class Run:
    """The run, as `on_begin` gets it. `config`: the job's options, for people; `folder`: the run's, which exists."""

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


class Callbacks:
    """Objects that have some of these methods, called in the script's own thread:

    on_begin(run: Run)                   before anything else, in each script
    on_status(status: JobStatus)         twice a second: step, loss, metrics, trainers, pservers
    on_step(step: int, metrics: dict)    each step, from 0 on, in order: the loss and metrics of it, over all slots
    on_event(event)                      each event since the script began: `at`, `who`, `kind`, `text`, `fields`
    on_epoch(epoch: int, metrics: dict)  an epoch is done, after its steps
    on_validation(epoch: int, metrics: dict)   a validation is over, in order; of `transpile(validate=)` with `every` so
                                         many steps: the step
    on_end()                             the run's processes have ended, in order
    flush()                              keep what steps and epochs gave: they are noted as reported after this
    """

    def __init__(self, callbacks: Sequence[Any] | None, called: Sequence[str] = NAMES) -> None:
        callbacks = () if callbacks is None else callbacks
        if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
            raise UsageError(
                f"callbacks is {callbacks!r}, expected a list", rule="option", help="callbacks=[callback], also for one"
            )
        for callback in callbacks:
            _check(callback, called)
        self._callbacks = tuple(callbacks)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def hears(self, name: str) -> bool:
        """Returns whether any of them has this method."""
        return any(callable(getattr(callback, name, None)) for callback in self._callbacks)

    def tell(self, name: str, *arguments: Any) -> None:
        """Calls this method of all that have it. Each gets a copy of the metrics."""
        for callback in self._callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                method(*(dict(a) if isinstance(a, Mapping) else a for a in arguments))


def _check(callback: Any, called: Sequence[str]) -> None:
    """Raises UsageError for what would only fail when an epoch is done."""
    known = [name for name in NAMES if callable(getattr(callback, name, None))]
    why = ""
    if isinstance(callback, type):
        why = "it is a class, not an object"
    elif not {*known} & {*called}:
        why = f"it has none of {', '.join(called)}"
    elif others := [n for n in dir(callback) if n.startswith("on_") and n not in NAMES]:
        why = f"it has {others[0]}, which is never called"
    for name in known if not why else ():
        try:
            inspect.signature(getattr(callback, name)).bind(*ARGUMENTS[name])
        except TypeError as error:
            why = f"{name} gets ({', '.join(ARGUMENTS[name])}): {error}"
    if why:
        raise UsageError(
            f"{callback!r} is no callback: {why}",
            rule="option",
            help=f"give an object with methods of {', '.join(NAMES)}",
        )


class Logger:
    """The base of the ready-made callbacks, which log values of three kinds: train (by step), epoch, validation."""

    def log(self, kind: str, number: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log("train", step, metrics)

    def on_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.log("epoch", epoch, {name: value for name, value in metrics.items() if name != "epoch"})

    def on_validation(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.log("validation", epoch, metrics)


def check_library(name: str, callback: str) -> None:
    """Raises UsageError if it is not installed. It is loaded when the callback first needs it."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"callback {callback} needs the package {name}", rule="callbacks", help=f"pip install {name}")
