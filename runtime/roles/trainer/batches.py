"""The batches that a trainer computes: read, noted in its work record, checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from graphft.ir import Program
from graphft.ops.context import ChunkWork, DataPort
from graphft.runtime.data import BatchKey, Prefetcher
from graphft.runtime.execute.input_checks import check_dims
from graphft.runtime.process.work_record import Phase, Place, WorkRecord
from graphft.runtime.roles.trainer.finite_check import FiniteCheck
from graphft.runtime.roles.trainer.state import TrainerState
from graphft.runtime.roles.trainer.storage_wait import StorageWait


@dataclass(eq=False, repr=False)
class Batches(DataPort):
    """The DataPort of a trainer.

    `begin`: told of each batch before it is read. `count`: batches of a unit of local accumulation; 1 without.
    """

    program: Program
    batch_size: int
    state: TrainerState
    work_record: WorkRecord
    prefetcher: Prefetcher
    storage: StorageWait
    check: FiniteCheck
    begin: Callable[[ChunkWork], object] = id
    count: int = 1

    def batch(self, work: ChunkWork, columns: Sequence[str]) -> list[torch.Tensor]:
        self.state.work, self.state.batch_samples = work, work.samples
        self.begin(work)
        counted = self.state.unit or work  # the queue counts units, where there are some
        place = Place(counted.pass_index, counted.chunk, counted.batch)
        self.work_record.begin(Phase.READING, place, counted.claim)
        batch = self.storage.batch(self._key(work))
        self.check.columns = {c: batch[c] for c in columns}
        self.check.numbers = functools.partial(self.prefetcher.numbers, self._key(work))
        self.check.names = self.prefetcher.names
        if "assume" in self.program.attrs:
            check_dims(self.program, {c: batch[c] for c in columns})
        self.work_record.begin(Phase.COMPUTING, place, counted.claim)
        return [batch[c] for c in columns]

    def read_ahead(self, work: ChunkWork) -> None:
        """Begins to make a batch that will be wanted; of a unit, its first one."""
        self.schedule(replace(work, batch=work.batch * self.count))

    def schedule(self, work: ChunkWork) -> None:
        """The same, of a batch of the chunk. Not after a process that died at work: then it is known what this one is
        at, should it die, too."""
        if work.samples and not self.state.careful:
            self.prefetcher.schedule(self._key(work))

    def _key(self, work: ChunkWork) -> BatchKey:
        return BatchKey(work.pass_index, work.chunk, work.batch, self.batch_size, work.without)
