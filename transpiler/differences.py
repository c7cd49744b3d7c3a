"""How a job differs from one that was saved, in words that a user knows: options, learning rate, ops, data, values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import GraphftError
from graphft.ir import Kind
from graphft.ir.storage import load_program
from graphft.transpiler.layout import SKIPPED_STEPS
from graphft.transpiler.program_differences import program_differences

if TYPE_CHECKING:
    from graphft.ir import Program
    from graphft.transpiler.config import JobConfig
    from graphft.transpiler.job import Job
    from graphft.transpiler.record import JobRecord

LISTED = 3
"""Differences of one kind that are named; of more, their number is told."""
_DATA = {"arrays": "data column", "files": "data file", "dataset": "the dataset's"}
"""What the parts of a description's fingerprint are, by its kind."""
_OF_FILES = ("urls",)
"""Of a description of files: what follows from these."""
_UNSEEDED = " (the script draws them without a seed: torch.manual_seed makes them the same each time)"


def drawn(saved: JobRecord, job: Job) -> bool:
    """True if both scripts drew their initial values without a seed: then these differ each time."""
    return saved.fingerprint.unseeded and job.fingerprint.unseeded


def differences(folder: Path, saved: JobRecord, job: Job, drawn: bool = False) -> list[str]:
    """Returns how `job` differs from the one `saved` in `folder`; [] if it is the same. `drawn`: of the initial values
    only frozen ones and constants count, which nobody draws."""
    old, new = saved.fingerprint, job.fingerprint
    found: list[str] = []
    if saved.config.storage != job.config.storage:
        found = [f"storage {saved.config.storage!r} -> {job.config.storage!r}"]
    data, source = data_differences(saved, job), _source(folder)
    if old.program != new.program:
        programs = program_differences(source, job.source) if source is not None else []
        found += [*_options(saved.config, job.config, data), *programs] or ["the programs"] * (not data)
    if job.config.data.kind == "arrays" and saved.config.data.records != job.config.data.records:
        data = []  # their number is told, and what is in them follows
    initial = _values(saved, job, source, drawn)
    unseeded = old.unseeded and new.unseeded
    return [*found, *data, *(value + _UNSEEDED * unseeded for value in initial)]


def _values(saved: JobRecord, job: Job, source: Program | None, drawn: bool) -> list[str]:
    """Returns how the initial values differ, but for what follows from another program (`source` was the one before):
    what is drawn after a layer of another size, or the state of another optimizer."""
    labels = _labels(job)
    old, new = (_whole(fingerprint.values, labels) for fingerprint in (saved.fingerprint, job.fingerprint))
    names = _differing(old, new)
    if source is not None and saved.fingerprint.program != job.fingerprint.program:
        if _trained(source) != _trained(job.source):
            return []
        names = [name for name in names if name in old and name in new]
    if drawn:
        given = {*labels.values(), *(v.name for v in job.source.of_kind(Kind.FROZEN))}
        names = [name for name in names if name in given]
    states = [name for name in names if "@" in name]
    return _named("initial value of", [name for name in names if name not in states]) or _named("state of", states)


def _trained(program: Program) -> dict[str, str]:
    return {v.name: str(v.type) for kind in (Kind.PARAM, Kind.BUFFER) for v in program.of_kind(kind)}


def data_differences(saved: JobRecord, job: Job) -> list[str]:
    """Returns how the data differs; of a dataset some items are compared."""
    names = _differing(saved.fingerprint.data, job.fingerprint.data)
    return _named(_DATA.get(job.config.data.kind, "data"), names)


def _source(folder: Path) -> Program | None:
    """The program that the saved job was made from; None if it cannot be read."""
    try:
        return load_program(folder / "source")
    except (GraphftError, OSError):
        return None


def _options(old: JobConfig, new: JobConfig, data: Sequence[str]) -> list[str]:
    """`data`: how it differs, as far as that is named already."""
    before, after = old.hashed(), new.hashed()
    found = []
    for k in after:
        if k == "data" and before[k] != after[k]:
            found += _description(old, new, data)
        elif before.get(k) != after.get(k):
            found += _changes(k, before.get(k), after.get(k))
    return found


def _changes(name: str, old: object, new: object) -> list[str]:
    """Of an option that has options of its own, those that differ."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        said = [type(v).__name__ if isinstance(v, Mapping) else repr(v) for v in (old, new)]
        return [f"{name} {said[0]} -> {said[1]}" if "dict" not in said else f"{name} (given in one of them)"]
    keys = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
    return [text for k in keys if k != "data" for text in _changes(f"{name}.{k}", old.get(k), new.get(k))] + [
        f"{name}'s data" for k in keys if k == "data"
    ]


def _description(old: JobConfig, new: JobConfig, named: Sequence[str]) -> list[str]:
    """How the data is described, beside what is in it, and what follows from that."""
    source = [config.data.options()["source"] for config in (old, new)]
    keys = [k for k in sorted(source[0].keys() | source[1].keys()) if source[0].get(k) != source[1].get(k)]
    found = [f"the data's {k}" for k in keys if k not in _OF_FILES and k in source[0] and k in source[1]]
    sizes = [[c.records for c in config.data.chunks] for config in (old, new)]
    more = sum(sizes[0]) != sum(sizes[1])
    if sizes[0] != sizes[1] and not (more and named and new.data.kind != "arrays"):
        words = [f"{sum(s)} records in {len(s)} chunks of at most {max(s, default=0)}" for s in sizes]
        found.append(f"the data's chunks, {' -> '.join(words)}")
    return found or ["how the data is described"] * (not named)


def _labels(job: Job) -> dict[str, str]:
    """What a constant is called: its name is none that the script knows."""
    return {v.name: f"a constant of the script, {v.type}" for v in job.source.of_kind(Kind.CONST)}


def _whole(digests: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Digests by variable of the user's program: the slices of one count as one."""
    merged: dict[str, str] = {}
    for name in sorted(digests.keys() - {SKIPPED_STEPS}):  # which is not the user's
        whole = name.split("@slice")[0]
        whole = labels.get(whole, whole)
        merged[whole] = merged.get(whole, "") + digests[name]
    return merged


def _differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def _named(kind: str, names: Sequence[str], of: str = "") -> list[str]:
    return [f"{kind} {_listed(names)}{of}"] if names else []


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - LISTED} more"] if len(names) > LISTED else []
    return ", ".join([*names[:LISTED], *more])
