"""What two runs of a job left behind, compared bit by bit; and whether every chunk of the data is accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from graphft.errors import GraphftError
from graphft.runtime.checkpoint import CheckpointStore
from graphft.runtime.etcd import Etcd
from graphft.runtime.keys import Keys
from graphft.transpiler import Job

MODEL = "model.safetensors"


def final_state(job: Job, folder: Path) -> dict[str, Tensor]:
    """Every tensor of the final checkpoint (parameters, buffers, optimizer state) and of the exported model.

    Raises GraphftError when the job is not complete, or the checkpoint is damaged.
    """
    store = CheckpointStore(folder / "checkpoints")
    last = next((m for m in store.manifests() if m.step == job.config.total_steps and m.program == job.hash), None)
    if last is None or not (folder / MODEL).exists():
        raise GraphftError(f"{folder} holds no complete run of this job", rule="chaos-reference",
                           help="run the job to its end first")
    state = {f"model: {name}": value for name, value in load_file(folder / MODEL).items()}
    for shard in range(job.config.pservers):
        state |= {f"shard {shard}: {name}": value for name, value in store.read_part(last, shard)[0].items()}
    return state


def differences(reference: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """What is not identical, in words. NaNs are equal when their bits are."""
    result = [f"{name}: only in {'the reference' if name in reference else 'this run'}"
              for name in sorted(reference.keys() ^ found.keys())]
    for name in sorted(reference.keys() & found.keys()):
        one, other = reference[name], found[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            result.append(f"{name}: {one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}")
            continue
        differing = int((_bits(one) != _bits(other)).any(-1).sum())
        if differing:
            result.append(f"{name}: {differing} of {one.numel()} elements differ")
    return result


def _bits(tensor: Tensor) -> Tensor:
    """[elements, bytes of one]"""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of the passes that etcd still has records of (the last two)."""

    expected: int
    done: int
    failed: int
    todo: int
    pending: int

    @property
    def accounted(self) -> bool:
        return self.expected == self.done + self.failed and not self.todo and not self.pending


def count_chunks(job: Job, etcd: Etcd) -> Chunks:
    """The state of the queue, after the job."""
    keys, passes = Keys(job.config.name), range(max(0, job.config.passes - 2), job.config.passes)
    in_pass = sum(1 for n in job.config.plan.batches if n)
    counts = [sum(etcd.count(f"{keys.queue(p)}{state}/") for p in passes)
              for state in ("done", "failed", "todo", "pending")]
    return Chunks(in_pass * len(passes), *counts)
