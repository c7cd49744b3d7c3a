"""Decides what follows from a job's validations: the best model so far, a lower learning rate, the end.

Decisions are a function of those before and of the result, in the order of the steps. The rules are those of torch's
ReduceLROnPlateau, which acts on the validation after `patience` ones without anything better, and of Keras' and
Lightning's EarlyStopping, which act on the last of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from graphft.transpiler.criteria import Criterion, EarlyStopping, ReduceLROnPlateau

if TYPE_CHECKING:
    from graphft.transpiler.validation import ValidationConfig


class Decided(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of `/<job>/decided`, after the validation of `step`. `best_step`: of the best model so far; -1: none.
    `bad`, `plateau_bad`: validations in a row without anything better. `scale`: factor of learning rates. `stopped`:
    why the job ends at this step; "": it goes on."""

    step: int = 0
    best_step: int = -1
    best: float | None = None
    stop_best: float | None = None
    bad: int = 0
    plateau_best: float | None = None
    plateau_bad: int = 0
    cooldown: int = 0
    scale: float = 1.0
    stopped: str = ""


def decide(terms: ValidationConfig, before: Decided, step: int, means: Mapping[str, float | str]) -> Decided:
    """Returns the decisions after a validation with the results `means`. What is not finite is never better."""
    now = msgspec.structs.replace(before, step=step)
    if terms.best is not None:
        now = _best(terms.best, now, float(means[terms.best.metric]))
    if terms.plateau is not None:
        now = _plateau(terms.plateau, now, float(means[terms.plateau.metric]))
    if terms.stop is not None:
        now = _stop(terms.stop, now, float(means[terms.stop.metric]))
    return now


def _best(criterion: Criterion, now: Decided, value: float) -> Decided:
    if not _better(criterion, value, now.best, 0.0):
        return now
    return msgspec.structs.replace(now, best=value, best_step=now.step)


def _plateau(terms: ReduceLROnPlateau, now: Decided, value: float) -> Decided:
    best, bad, cooldown, scale = now.plateau_best, now.plateau_bad, now.cooldown, now.scale
    margin = terms.threshold * (abs(best or 0.0) if terms.threshold_mode == "rel" else 1.0)
    if _better(terms, value, best, margin):
        best, bad = value, 0
    else:
        bad += 1
    if cooldown > 0:
        cooldown, bad = cooldown - 1, 0
    if bad > terms.patience:
        scale, cooldown, bad = max(scale * terms.factor, terms.min_scale), terms.cooldown, 0
    return msgspec.structs.replace(now, plateau_best=best, plateau_bad=bad, cooldown=cooldown, scale=scale)


def _stop(terms: EarlyStopping, now: Decided, value: float) -> Decided:
    if _better(terms, value, now.stop_best, terms.min_delta):
        return msgspec.structs.replace(now, stop_best=value, bad=0)
    bad = now.bad + 1
    way = "lower" if terms.mode == "min" else "higher"
    than = f"{way} than {now.stop_best:.6g}" if now.stop_best is not None else "finite"
    why = f"{terms.metric} was not {than} in {bad} validations" if bad >= terms.patience else ""
    return msgspec.structs.replace(now, bad=bad, stopped=now.stopped or why)


def _better(criterion: Criterion, value: float, best: float | None, margin: float) -> bool:
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - margin if criterion.mode == "min" else value > best + margin


def in_words(before: Decided, now: Decided) -> str:
    """Returns what a validation has changed, for people; "": nothing."""
    found = ["the best so far"] if now.best_step == now.step else []
    if now.scale != before.scale:
        found.append(f"from here on learning rates are {now.scale:.6g} of their schedule")
    if now.stopped:
        found.append(f"the job STOPS here: {now.stopped}")
    return "; ".join(found)


class RangeResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a range. `sums`: over its records, in the order of the program's results, as text that gives the
    same float64 (JSON has no NaN)."""

    samples: int
    sums: tuple[str, ...]


def sums_as_text(sums: Iterable[float]) -> tuple[str, ...]:
    return tuple(repr(float(value)) for value in sums)


def totals(records: Mapping[int, RangeResult], count: int) -> tuple[int, tuple[float, ...]] | None:
    """Returns (samples, the mean of each result) over all ranges, added up in their order: the same bits however
    they were computed. None if some are not computed."""
    if any(number not in records for number in range(count)):
        return None
    done = [records[number] for number in range(count)]
    samples = sum(record.samples for record in done)
    columns = zip(*(map(float, record.sums) for record in done), strict=True)
    # From left to right: `sum` rounds in another way in newer Pythons.
    return samples, tuple(functools.reduce(operator.add, column, 0.0) / samples for column in columns)


def as_number(value: float) -> float | str:
    """Returns a value for JSON, which has no number for what is not finite."""
    return value if math.isfinite(value) else str(value)
