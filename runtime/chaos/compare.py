"""Compares what two runs of a job left behind, bit by bit; and counts how often an async job applied each batch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore, checkpoints_of
from graphft.runtime.coordination.result_files import read_validations
from graphft.runtime.process.metric_table import read_rows
from graphft.runtime.protocol.ledger import ALL, Ledger
from graphft.runtime.validation.best_model import BestModels
from graphft.transpiler import Job, read_record

MODEL = "model.safetensors"


def final_state(job: Job, folder: Path) -> dict[str, Tensor]:
    """Returns every tensor of the final checkpoint (parameters, buffers, optimizer state) and of the exported model;
    the means of each validation, and which model was the best by them. Raises GraphftError when the job is not
    complete, or the checkpoint is damaged."""
    store = checkpoints_of(folder)
    last = _last(job, store, folder)
    state = {f"model: {name}": value for name, value in load_file(folder / MODEL).items()}
    for shard in range(job.config.pservers):
        state |= {f"shard {shard}: {name}": value for name, value in store.read_part(last, shard)[0].items()}
    for step, row in read_validations(folder).items():
        state |= {
            f"validation of step {step}: {n}": torch.tensor(v, dtype=torch.float64) for n, v in row.metrics.items()
        }
    validate = job.config.validate
    if validate is not None and validate.best is not None:
        kept = BestModels(folder, validate.best.mode or "min").best()
        state["step of the best model"] = torch.tensor(-1 if kept is None else kept.step)
    return state


def metric_differences(reference: Path, folder: Path) -> list[str]:
    """Compares the metrics tables in two folders: returns which steps differ, in words."""
    one, other = (read_rows(path).data for path in (reference, folder))
    count = min(len(one), len(other))
    bits = [np.ascontiguousarray(rows["values"][:count]).view(np.int64) for rows in (one, other)]
    differs = (one["samples"][:count] != other["samples"][:count]) | (bits[0] != bits[1]).any(1)
    lengths = [f"its table of metrics has {len(other)} steps, the reference's {len(one)}"] * (len(one) != len(other))
    return [*lengths, *(f"metrics of step {step}: differ" for step in np.flatnonzero(differs))]


def _last(job: Job, store: CheckpointStore, folder: Path) -> Manifest:
    """Returns the newest manifest of the complete run in this folder, which may have been stopped early."""
    run = read_record(folder).run_id
    last = next((m for m in store.manifests() if m.run == run), None)
    if last is None or not (folder / MODEL).exists():
        raise GraphftError(
            f"{folder} holds no complete run of this job", rule="chaos-reference", help="run the job to its end first"
        )
    return last


def last_step(job: Job, folder: Path) -> int:
    """Returns after how many steps the complete run of this folder ended; fewer than planned if it stopped early."""
    return _last(job, checkpoints_of(folder), folder).step


def differences(reference: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Returns what is not identical, in words. NaNs are equal when their bits are."""
    result = [
        f"{name}: only in {'the reference' if name in reference else 'this run'}"
        for name in sorted(reference.keys() ^ found.keys())
    ]
    for name in sorted(reference.keys() & found.keys()):
        one, other = reference[name], found[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            result.append(f"{name}: {one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}")
            continue
        bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (one, other)]  # [elements, bytes]
        if differing := int((bits[0] != bits[1]).any(-1).sum()):
            result.append(f"{name}: {differing} of {one.numel()} elements differ")
    return result


def final_ledgers(job: Job, folder: Path) -> list[tuple[int, Ledger]]:
    """Async: of each shard's last checkpoint, its version and its ledger."""
    store = checkpoints_of(folder)
    last = _last(job, store, folder)
    return [
        (version, Ledger.load(json.loads(store.read_part(last, shard)[1])))
        for shard, version in enumerate(last.meta["versions"])
    ]


def not_once(job: Job, folder: Path, discarded: Collection[int] = ()) -> list[str]:
    """Async: the batches that a shard has not applied exactly once, in words.

    A shard's ledger holds what it has applied, and its version counts how often it has applied anything: when the
    ledger holds every batch and the version is their number, each was applied once. `discarded`: chunks of which
    something is left out, and any part may be applied.
    """
    batches = job.config.plan.batches
    chunks = [c for c, n in enumerate(batches) if n and c not in discarded]
    expected = {(p, c) for p in range(job.config.passes) for c in chunks}
    found = []
    for shard, (version, ledger) in enumerate(final_ledgers(job, folder)):
        lacking = [(p, c) for p, c in sorted(expected) if ledger.ranges(p, c) != [(0, ALL)]]
        found += [
            f"shard {shard}: chunk {c} of pass {p} is applied in {ledger.ranges(p, c)} of {batches[c]} batches"
            for p, c in lacking
        ]
        applied = sum(int(batches[c]) for p, c in expected if (p, c) not in lacking)
        if not discarded and not lacking and version != applied:
            found.append(f"shard {shard} has applied {version} times what are {applied} batches")
    return found
