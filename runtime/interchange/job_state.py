"""Reads what a job holds of its model and optimizer: whole tensors, whatever pservers held them in slices."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.ir import Kind, Program
from graphft.optim.optimizers import OPTIMIZERS, SCALAR_STATE, Optimizer
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore, checkpoints_of
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint
from graphft.runtime.coordination.job_storage import fetch, is_url, stored_run
from graphft.transpiler import Job
from graphft.transpiler.layout import assemble, slices_of
from graphft.transpiler.optimization import find_optimization, rates_at
from graphft.transpiler.record import RECORD

log = logging.getLogger("graphft")

LOOKS, LOOK_SECONDS = 4, 0.1
"""A running job deletes old checkpoints: what is gone when it is read is looked for again."""


@dataclass(frozen=True)
class JobState:
    """`step`: async: of the shard that has applied the fewest batches. `model`: its state_dict. `optimizer`: by
    parameter, its state by the names of torch.optim. `updates`: by parameter, the optimizer and its options at that
    step."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    updates: dict[str, Optimizer]


@contextmanager
def job_folder(source: str | os.PathLike[str], *, whole: bool = False) -> Iterator[Path | None]:
    """Yields the folder of a job; of its storage a copy of its record (`whole`: and of its programs), for as long as
    this lasts; None for what is no job's. Raises GraphftError[storage]."""
    if not is_url(source):
        folder = Path(source)
        yield folder if (folder / RECORD).exists() else None
    elif not stored_run(url := os.fspath(source).rstrip("/")):
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
            fetch(url, Path(scratch, "job"), whole=whole)
            yield Path(scratch, "job")


def read_job(folder: Path, step: int | None = None) -> JobState:
    """Reads the newest checkpoint in a job's folder that is whole, or that of `step`. The job may be running, on
    any machine.

    Raises UsageError[no-checkpoint] if there is none (yet), DamagedCheckpoint if none is whole.
    """
    job = Job.load(folder)
    for left in reversed(range(LOOKS)):
        try:
            reached, shards = _read(job, folder, step)
            model, optimizer = assemble(job.trainer_program(), shards), _optimizer(job, shards)
            return JobState(reached, model, optimizer, _updates(job.source, reached))
        except GraphftError:  # the job may have replaced what was looked at just now
            if not left:
                raise
            time.sleep(LOOK_SECONDS)
    raise AssertionError


def _read(job: Job, folder: Path, step: int | None) -> tuple[int, list[dict[str, Tensor]]]:
    """Returns the step, and what each shard held."""
    everything = range(job.config.pservers)
    store = checkpoints_of(folder)
    there = [m for m in store.manifests() if m.run == job.run_id and step in (None, m.step)]
    if there:  # in the order in which the job goes on
        there.sort(key=lambda m: (m.generation, m.step), reverse=True)
        return _newest_whole(store, there, everything)
    if step is not None or job.config.sync:
        what = (
            "checkpoint yet"
            if step is None
            else f"checkpoint of step {step}" + " of all shards" * (not job.config.sync)
        )
        raise _none(folder, what)
    found = []  # async, before the end: each shard has its own
    for shard in everything:
        store = checkpoints_of(folder, shard)
        own = [m for m in store.manifests() if m.run == job.run_id]
        if not own:
            raise _none(folder, f"checkpoint yet of shard {shard}")
        found.append(_newest_whole(store, own, [shard]))
    return min(reached for reached, _ in found), [tensors for _, (tensors,) in found]


def _newest_whole(
    store: CheckpointStore, manifests: Sequence[Manifest], shards: Sequence[int]
) -> tuple[int, list[dict[str, Tensor]]]:
    """Returns step and tensors of the first that can be read. Raises DamagedCheckpoint if none can."""
    damaged: list[DamagedCheckpoint] = []
    for manifest in manifests:
        try:
            tensors = [store.read_part(manifest, shard)[0] for shard in shards]
        except DamagedCheckpoint as error:
            log.error("%s", error.message)
            damaged.append(error)
            continue
        if damaged:
            log.error("going back to the checkpoint of step %d, the newest that is whole", manifest.step)
        return manifest.step, tensors
    raise DamagedCheckpoint(
        f"none of the {len(damaged)} checkpoints is whole: {damaged[0].message}",
        rule="checkpoint",
        help="bring one back as it was",
    )


def _none(folder: Path, what: str) -> UsageError:
    return UsageError(
        f"{folder} has no {what}",
        rule="no-checkpoint",
        help=f"`graphft checkpoint list {folder}` says which there are, `graphft status` when the next one comes",
    )


def _optimizer(job: Job, shards: Sequence[Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for v in job.trainer_program().of_kind(Kind.PARAM):
        slices = slices_of(v)
        prefix = f"{slices[0].name}@"
        keys = [
            n.removeprefix(prefix)
            for n in shards[slices[0].shard]
            if n.startswith(prefix) and "@" not in n[len(prefix) :]
        ]
        state = {}
        for key in keys:
            parts = [shards[s.shard][f"{s.name}@{key}"] for s in slices]
            if key == SCALAR_STATE:
                state[key] = parts[0]
            else:
                state[key] = torch.cat([p.reshape(-1) for p in parts]).reshape([int(d) for d in v.shape])
        if state:
            found[v.name] = state
    return found


def _updates(program: Program, step: int) -> dict[str, Optimizer]:
    found, rates = {}, rates_at(program, step)
    for name, op in find_optimization(program.blocks["step"]).updates.items():
        found[name] = OPTIMIZERS[op.type](lr=rates[op.operand("lr").name], **op.attrs)
    return found
