"""The results of batches and ranges: sums of means, and entries, of which each record has one.

The entries of each range are in a file, in the job's folder and in its storage, until a reducer reads all of them:

    <job>/entries/<step>.g<generation>/<range>.safetensors

A file appears whole or not at all; two processes that compute the same range write the same contents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from graphft.capture.loss_fn import reported
from graphft.disk.tensor_file import read_tensors
from graphft.errors import GraphftError, describe
from graphft.ir import Program
from graphft.reducers import all_name
from graphft.runtime.checkpoint.versioned_store import StorageUnavailable, storage
from graphft.runtime.coordination.job_files import ENTRIES, delete_entries
from graphft.runtime.coordination.records import Validating
from graphft.runtime.execute.lowering import lower
from graphft.runtime.validation.best_model import RunFiles
from graphft.transpiler.evaluation import results_of


def means_of(program: Program) -> tuple[str, ...]:
    """Returns the names of the results that are means over the records of a batch."""
    return tuple(name for name in reported(program) if not program.variables[name].type.shape)


@dataclass
class RangeResults:
    """The sums of the batches of a range so far, added up in their order: every process computes the same bits."""

    program: Program
    samples: int = 0
    batches: int = 0
    sums: list[float] = field(default_factory=list)
    entries: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, samples: int, results: Sequence[Tensor]) -> None:
        found = dict(zip(reported(self.program), results, strict=True))
        means = [float(found.pop(name)) for name in means_of(self.program)]
        before = self.sums or [0.0] * len(means)
        self.sums = [total + mean * samples for total, mean in zip(before, means, strict=True)]
        for name, value in found.items():
            self.entries.setdefault(name, []).append(value.detach().cpu().clone())
        self.samples, self.batches = self.samples + samples, self.batches + 1


def named(program: Program, means: Sequence[float], entries: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the results of a validation by name: the means, then what block `reduce` makes of all entries."""
    found = dict(zip(means_of(program), means, strict=True))
    block = program.blocks.get("reduce")
    if block is None:
        return found
    scope = dict(program.values) | {all_name(name): value for name, value in entries.items()}
    names = results_of(program)[len(found) :]
    reduced = lower(block, fetch=names)(None, scope)
    return found | {name: float(value) for name, value in zip(names, reduced, strict=True)}


class LostEntries(GraphftError):
    """The entries of a range cannot be read."""


class Entries:
    """The entries of one validation. Raises StorageUnavailable where files cannot be read or written."""

    def __init__(self, job_dir: Path, step: int, of: Validating) -> None:
        self._job_dir, self._name = job_dir, f"{ENTRIES}/{step:08d}.g{of.generation}"
        self._files = RunFiles(job_dir, self._name)

    def write(self, number: int, entries: Mapping[str, Sequence[Tensor]]) -> None:
        """`entries`: by result, one tensor for each batch of the range."""
        whole = {name: torch.cat(list(parts)) for name, parts in entries.items()}
        self._files.write(f"{number:08d}.safetensors", whole)

    def read(self, count: int) -> dict[str, Tensor]:
        """Returns, by result, the entries of all records, in the order of the data. Raises LostEntries."""
        parts = []
        for number in range(count):
            try:
                with storage(self._files.folder):
                    parts.append(read_tensors(self._files.fetch(f"{number:08d}.safetensors"))[0])
            except StorageUnavailable:
                raise
            except (OSError, GraphftError) as error:
                why = f"entries of range {number} are lost: {describe(error)}"
                raise LostEntries(why, rule="entries") from error
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def delete(self) -> None:
        delete_entries(self._job_dir, self._name)
