"""Validation as part of a job: `transpile(validate=Validation(...))`. `ValidationConfig` is what is in its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from graphft.data import DataSpec
from graphft.errors import UsageError
from graphft.ir import Program
from graphft.options import checked_options, is_whole
from graphft.plan import Plan
from graphft.transpiler.criteria import Criterion, EarlyStopping, ReduceLROnPlateau, criterion

EPOCH: Literal["epoch"] = "epoch"
_TERMS: dict[str, Any] = {"best": Criterion, "stop": EarlyStopping, "plateau": ReduceLROnPlateau}
MOST_OPEN = 4
"""So many validations are not over at most: training waits then, since each keeps a checkpoint."""
RANGE_BATCHES = 8
"""Batches that a trainer takes at a time: so many of them at least are worth two transactions of etcd."""


@dataclass(frozen=True)
class ValidationConfig:
    """`every`: so many steps, and at the end; 0: at the end of each epoch."""

    data: DataSpec
    batch_size: int
    every: int = 0
    best: Criterion | None = None
    stop: EarlyStopping | None = None
    plateau: ReduceLROnPlateau | None = None

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        return tuple(c for c in (self.best, self.stop, self.plateau) if c is not None)

    @property
    def waits(self) -> bool:
        """True if training waits for a validation: what comes after it depends on its result."""
        return self.stop is not None or self.plateau is not None

    def steps(self, plan: Plan) -> frozenset[int]:
        """Returns after how many steps of the job the model is validated."""
        ends = range(self.every, plan.total_steps, self.every) if self.every else plan.start_steps[1:]
        return frozenset((*ends, plan.total_steps))

    @cached_property
    def ranges(self) -> tuple[tuple[int, int, int], ...]:
        """(chunk, its first batch, batches) of each range that a trainer takes at a time."""
        return tuple(
            (chunk, first, min(RANGE_BATCHES, count - first))
            for chunk, count in enumerate(self.data.batches(self.size))
            for first in range(0, count, RANGE_BATCHES)
        )

    @property
    def size(self) -> int:
        """The size of its batches: the longest chunk may be shorter than `batch_size`."""
        return min(self.batch_size, max(chunk.records for chunk in self.data.chunks))

    def samples(self, chunk: int, batch: int) -> int:
        """Returns the records of a batch."""
        return min(self.size, self.data.chunks[chunk].records - batch * self.size)

    def options(self) -> dict[str, Any]:
        """Returns the JSON without what the data was when it was described."""
        return self.to_json() | {"data": self.data.options()}

    def to_json(self) -> dict[str, Any]:
        terms = {name: c.to_json() for name in _TERMS if (c := getattr(self, name)) is not None}
        return {"data": self.data.to_json(), "batch_size": self.batch_size, "every": self.every, **terms}

    @staticmethod
    def from_json(data: Mapping[str, Any] | None) -> ValidationConfig | None:
        """Returns the inverse of `to_json`. Raises KeyError, TypeError or GraphftError when `data` is none."""
        if data is None:
            return None
        terms = {name: kind(**data[name]) for name, kind in _TERMS.items() if name in data}
        return ValidationConfig(DataSpec.from_json(data["data"]), int(data["batch_size"]), int(data["every"]), **terms)


@checked_options()
@dataclass(frozen=True)
class Validation:
    """Data to validate with, of `graphft.arrays`, `files` or `dataset`; every record counts once, and the last
    batches may be shorter than `batch_size`.

    Args:
        program: Of the same model, `graphft.build(model, loss_fn, inputs, training=False)`. By default `transpile` and
            `Trainer` capture it from the model that their program was built from.
        every: (`transpile`) "epoch", or a number of steps, which means at the end of the job, too.
        loss_fn: Another one than that of the program that is trained; what it returns beside the loss are metrics:
            means over all records. Entries of which each record has one go to `reduce`, and no further.
        reduce: By name, a function of some of these entries, as tensors of all records in the order of the data; it
            returns one float. Captured as the model is.
        best: (`transpile`) A metric, by which the best model is kept: "loss", "auc", or `Criterion("auc", "max")`.
        stop: (`transpile`) `EarlyStopping`: the job ends when a metric gets no better.
        plateau: (`transpile`) `ReduceLROnPlateau`: learning rates go down when a metric gets no better.

            def auc(scores, labels): ...
            Validation(data=held_out, loss_fn=with_scores, reduce={"auc": auc})
    """

    program: Program | None = None
    data: DataSpec | None = None
    batch_size: int = 256
    every: Literal["epoch"] | int = EPOCH
    loss_fn: Callable[..., Any] | None = None
    reduce: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    best: Criterion | str | None = None
    stop: EarlyStopping | str | None = None
    plateau: ReduceLROnPlateau | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.data, DataSpec):
            raise _bad("data", type(self.data), "what arrays, files or dataset return", "name it: Validation(data=...)")
        if not isinstance(self.program, (Program, type(None))):
            help = "graphft.build(model, loss_fn, inputs, training=False)"
            raise _bad("program", type(self.program), "a Program", help)
        if not is_whole(self.batch_size, 1):
            raise _bad("batch_size", self.batch_size, "a number, 1 or more", "256, or so")
        if self.every != EPOCH and not is_whole(self.every, 1):
            raise _bad("every", self.every, '"epoch", or a number of steps, 1 or more', 'every="epoch"')
        if self.program is not None and (self.loss_fn is not None or self.reduce):
            help = "leave the program out: it is captured from the model of the program that is trained"
            raise _bad("program", "given", "none, as loss_fn or reduce is given, which is for capturing one", help)
        if not isinstance(self.reduce, Mapping) or not all(map(callable, self.reduce.values())):
            raise _bad("reduce", self.reduce, "functions by name", 'reduce={"auc": auc}')
        self.config()

    def config(self) -> ValidationConfig:
        assert self.data is not None
        terms: dict[str, Any] = {name: criterion(kind, getattr(self, name), name) for name, kind in _TERMS.items()}
        return ValidationConfig(self.data, int(self.batch_size), 0 if self.every == EPOCH else int(self.every), **terms)


def _bad(name: str, value: object, wanted: str, help: str) -> UsageError:
    return UsageError(f"{name} is {value!r}, expected {wanted}", rule="option", help=help)
