"""A checkpoint of a sync job for another number of pservers, or for more passes: the same bits, cut elsewhere.

An async job's shards are each at batches of its own: it has no state as a whole before its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import MADE, SOURCE, VALIDATE, Manifest, made
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.transpiler.differences import differences, drawn
from graphft.transpiler.job import Job
from graphft.transpiler.layout import Slice, evolving, slices_of
from graphft.transpiler.record import read_record

LAYOUT = ("pservers", "slice_unit", "min_block")
"""Options that say where what lies, and change no bit."""


def layout_differences(job: Job, folder: Path) -> list[str]:
    """Returns how the run in a folder differs from the job, if both are sync and fault-tolerant, and that is in nothing
    but where what lies, and in that the job has more passes; else []. Raises GraphftError for a folder that holds no
    job."""
    found = read_record(folder)
    if not (job.config.sync and job.config.ft and found.config.sync and found.config.ft):
        return []
    more = job.config.epochs > found.config.epochs and not job.config.passes_on_demand
    layout = {name: getattr(found.config, name) for name in (*LAYOUT, *(["epochs"] * more))}
    words = [
        f"{n} {value} -> {getattr(job.config, n)}" for n, value in layout.items() if value != getattr(job.config, n)
    ]
    same = Job.make(job.source, job.config.replace(**layout, storage=found.config.storage), job.evaluation)
    return words if words and not differences(folder, found, same, drawn(found, job)) else []


def carry_over(source: Path, job: Job, target: Path) -> int | None:
    """Writes the newest whole checkpoint of the run in `source`, which has `layout_differences`, as one of `job` in the
    folder `target`. Returns its step; None if there is none: nothing is written then.

    Raises DamagedCheckpoint if none is whole, OSError or StorageUnavailable where files cannot be read or written.
    """
    old = Job.load(source)
    found = checkpoints_of(source).read_newest(old.run_id, range(old.config.pservers))
    if found is None:
        return None
    manifest, shards = found
    store = checkpoints_of(target)
    values = reshard(old, shards, job)
    parts = tuple(store.write_part(0, manifest.step, i, len(values), each) for i, each in enumerate(values))
    by = made(**{SOURCE: f"{manifest.directory} of run {old.run_id}"})
    meta = {name: value for name, value in manifest.meta.items() if name != VALIDATE}
    validate = {VALIDATE: True} if manifest.step in job.config.validated else {}
    store.write_manifest(Manifest(0, manifest.step, job.run_id, parts, {**meta, MADE: by, **validate}))
    return manifest.step


def reshard(old: Job, shards: Sequence[Mapping[str, Tensor]], new: Job) -> list[dict[str, Tensor]]:
    """Returns what each shard of `new` is to hold, of what those of `old` held. Raises GraphftError[reshard] if the two
    jobs do not hold the same."""
    whole, left = whole_variables(old, shards)
    rest = left[0]
    for i, other in enumerate(left):
        if other.keys() != rest.keys() or any(not torch.equal(other[n], rest[n]) for n in rest):
            raise GraphftError(
                f"shard {i} does not hold the same as shard 0: {', '.join(sorted(other.keys() | rest.keys())[:5])}",
                rule="reshard",
                help="go on with as many pservers as before",
            )
    found: list[dict[str, Tensor]] = [dict(rest) for _ in range(new.config.pservers)]
    for v in evolving(new.trainer_program()):
        for s in slices_of(v):
            for key, value in whole[v.name].items():
                mine = value if value.dim() == 0 else value[s.start : s.end]
                found[s.shard][f"{s.name}{key}"] = mine.clone()
    for i, values in enumerate(found):
        wanted = new.pserver_program(i).values
        kinds = {n: (t.shape, t.dtype) for n, t in values.items()}
        if kinds != {n: (t.shape, t.dtype) for n, t in wanted.items()}:
            names = sorted(kinds.keys() ^ wanted.keys()) or [n for n, t in wanted.items() if kinds[n][0] != t.shape]
            raise GraphftError(
                f"the checkpoint does not have what pserver {i} holds: {', '.join(names[:5])}",
                rule="reshard",
                help="go on with as many pservers as before",
            )
    return found


def whole_variables(
    job: Job, shards: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[str, dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Returns by variable its value (key "") and its state ("@exp_avg"), flat or without a dimension; and what else
    each shard holds."""
    left = [dict(values) for values in shards]
    whole: dict[str, dict[str, Tensor]] = {}
    for v in evolving(job.trainer_program()):
        parts = [_of_slice(left[s.shard], s) for s in slices_of(v)]
        whole[v.name] = {
            key: value if value.dim() == 0 else torch.cat([p[key].reshape(-1) for p in parts])
            for key, value in parts[0].items()
        }
    return whole, left


def _of_slice(values: dict[str, Tensor], part: Slice) -> dict[str, Tensor]:
    """Takes a slice and its state ("w", "w@exp_avg") out of what a shard holds."""
    names = [n for n in values if n == part.name or n.rpartition("@")[0] == part.name]
    return {n.removeprefix(part.name): values.pop(n) for n in names}
