"""An async trainer's side of the data plane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from graphft import registry
from graphft.errors import GraphftError
from graphft.ops.context import NoData, WorkChanged
from graphft.runtime.protocol.async_events import (
    AsyncTrainerOptions,
    BeginBatch,
    ChunkKey,
    CloseBatch,
    Dropped,
    Loaded,
    Took,
)
from graphft.runtime.protocol.async_trainer import AsyncTrainer
from graphft.runtime.roles.trainer.comm import POLL_SECONDS, Comm, buckets_of
from graphft.runtime.transport.buffers import unpack

if TYPE_CHECKING:
    from graphft.ops.context import Slices
    from graphft.runtime.roles.trainer.chunk_trainer import ChunkTrainer


class AsyncComm(Comm):
    """The CommPort of an async trainer, and what its queue wants to know of the shards."""

    trainer: ChunkTrainer
    machine: AsyncTrainer

    def __init__(self, trainer: ChunkTrainer) -> None:
        super().__init__(trainer)
        barrier = trainer.program.find_op("send_barrier")
        assert barrier is not None
        self.push_timeout: float = registry.attr(barrier, "push_timeout")
        self.patience = max(self.patience, self.push_timeout)
        self.machine = AsyncTrainer(
            AsyncTrainerOptions(trainer.id, buckets_of(trainer), trainer.job.run_id, trainer.secret)
        )

    # -- for the queue ------------------------------------------------------------------------------------------

    def took(self, key: ChunkKey, batches: int) -> None:
        self.do(Took(key, batches))

    def dropped(self, key: ChunkKey) -> None:
        self.do(Dropped(key))

    def await_ledgers(self, key: ChunkKey) -> None:
        """Waits until the shards have told what they have of a chunk; not longer than for any other answer."""
        end = time.monotonic() + self.push_timeout
        self.take_in(0)
        while not self.machine.known(key) and time.monotonic() < end:
            if self.trainer.stops:
                raise NoData
            self.pump(POLL_SECONDS)

    def whole(self, key: ChunkKey) -> bool:
        return self.machine.whole(key)

    def progress(self, key: ChunkKey) -> int:
        return self.machine.progress(key)

    def next_batch(self, key: ChunkKey, last: int) -> int | None:
        return self.machine.next_batch(key, last)

    def generations(self) -> list[int]:
        return self.machine.generations()

    def newest(self) -> int:
        return self.machine.newest()

    def begin(self, key: ChunkKey, batch: int) -> None:
        """The batch that the following transfers belong to."""
        self.do(BeginBatch(key, batch))

    # -- CommPort -----------------------------------------------------------------------------------------------

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        self.take_in(0)
        while not self.machine.has(shard, bucket):
            if self.trainer.stops:
                raise WorkChanged
            self.pump(POLL_SECONDS)
        frame = self.machine.frame(shard, bucket)
        if frame is not None:
            unpack(frame, tensors, slices)
            self.do(Loaded(shard, bucket, refresh))

    def end_pull(self, shards: int) -> None:
        while self.machine.answered() < shards:
            if self.trainer.stops:
                raise WorkChanged
            self.pump(POLL_SECONDS)

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices) -> None:
        if not self.machine.lacks(shard):
            return
        try:
            super().push(shard, bucket, tensors, slices)
        except GraphftError as error:
            if error.rule != "buffer-in-use":
                raise
            self.trainer.counters["stuck"] += 1  # a shard that takes no data; the barrier gives it its time
            self.reconnect(shard, self.machine.connections[shard].incarnation)

    def end_push(self, shards: int, push_timeout: float, max_skipped: int) -> None:
        self.do(CloseBatch(push_timeout, max_skipped))
        end = time.monotonic() + push_timeout
        while self.machine.settled() < shards:
            if self.trainer.stops and time.monotonic() > end:
                raise WorkChanged
            self.pump(POLL_SECONDS)
