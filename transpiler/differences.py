"""Says how a job differs from a saved one, in a user's words: options, variables, ops, data, values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, listed
from graphft.ir import Kind
from graphft.ir.printer import format_operator
from graphft.ir.storage import load_program
from graphft.transpiler.layout import SKIPPED_STEPS

if TYPE_CHECKING:
    from graphft.ir import Program
    from graphft.transpiler.job import Job
    from graphft.transpiler.record import JobRecord

LONG = 100
"""Characters of two values that are shown; of longer ones, only the name is."""
_DATA = {"arrays": "data column", "files": "data file", "dataset": "the dataset's"}
"""Words for the parts of a description's fingerprint, by its kind."""
_UNSEEDED = " (the script draws them without a seed: torch.manual_seed makes them the same each time)"
_SHOWN = (Kind.INPUT, Kind.PARAM, Kind.BUFFER, Kind.STATE)


def drawn(saved: JobRecord, job: Job) -> bool:
    """True if both scripts drew their initial values without a seed: then these differ each time."""
    return saved.fingerprint.unseeded and job.fingerprint.unseeded


def differences(folder: Path, saved: JobRecord, job: Job, drawn: bool = False) -> list[str]:
    """Returns how `job` differs from the one `saved` in `folder`; [] if it is the same. `drawn`: of the initial values
    only frozen ones and constants count, which nobody draws."""
    old, new, found = saved.fingerprint, job.fingerprint, list[str]()
    if saved.config.storage != job.config.storage:
        found.append(f"storage {saved.config.storage!r} -> {job.config.storage!r}")
    data = data_differences(saved, job)
    if old.program != new.program:
        changed = list(_options(saved.config.hashed(), job.config.hashed(), "data." if data else "-"))
        try:
            program = _program(load_program(folder / "source"), job.source)
        except (GraphftError, OSError):
            program = ["the programs"]
        found += [*changed, *program] or ["the programs"] * (not data)
        if program:  # initial values follow from it
            return [*found, *data]
    return [*found, *data, *_values(saved, job, drawn)]


def data_differences(saved: JobRecord, job: Job) -> list[str]:
    """Returns how the data differs; of a dataset some items are compared."""
    names = _differing(saved.fingerprint.data, job.fingerprint.data)
    return [f"{_DATA[job.config.data.kind]} {listed(names)}"] if names else []


def _options(old: Mapping[str, Any], new: Mapping[str, Any], named: str, prefix: str = "") -> Iterator[str]:
    """Yields the options that differ; those of an option by their path. What begins with `named` is named already."""
    for key in _differing(old, new):
        a, b, path = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _options(a, b, named, f"{path}.")
        elif not path.startswith(named):
            text = f"{path} {a!r} -> {b!r}"
            yield text if len(text) < LONG else path


def _program(old: Program, new: Program) -> list[str]:
    """Returns the variables that differ; if there are none, the first op: those behind it mostly follow from it."""
    before, after = ({v.name: f"{v.type}" for v in p.of_kind(*_SHOWN)} for p in (old, new))
    if names := _differing(before, after):
        return [listed([f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names])]
    for a, b in zip_longest(*(p.blocks["step"].ops if "step" in p.blocks else () for p in (old, new))):
        if a != b:
            texts = [format_operator(op, p).strip() if op else "none" for op, p in ((a, old), (b, new))]
            return [" -> ".join(texts) + (f" ({b.loc})" if b is not None and b.loc else "")]
    return []


def _values(saved: JobRecord, job: Job, drawn: bool) -> list[str]:
    """Returns how the initial values differ."""
    # A constant has a name that the script does not know.
    labels = {v.name: f"a constant of the script, {v.type}" for v in job.source.of_kind(Kind.CONST)}
    names = _differing(*(_whole(of.fingerprint.values, labels) for of in (saved, job)))
    if drawn:
        given = {*labels.values(), *(v.name for v in job.source.of_kind(Kind.FROZEN))}
        names = [name for name in names if name in given]
    unseeded = saved.fingerprint.unseeded and job.fingerprint.unseeded
    return [f"initial value of {listed(names)}" + _UNSEEDED * unseeded] if names else []


def _whole(digests: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Returns the digests by variable of the user's program: the slices of one count as one."""
    merged: dict[str, str] = {}
    for name in sorted(digests.keys() - {SKIPPED_STEPS}):  # which is not the user's
        whole = name.split("@slice")[0]
        whole = labels.get(whole, whole)
        merged[whole] = merged.get(whole, "") + digests[name]
    return merged


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
