"""An async trainer's side of the data plane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphft.ops.context import ChunkWork, CommPort, NoData, OnNonfinite, Slices, WorkChanged
from graphft.runtime.protocol.async_trainer import AsyncTrainer
from graphft.runtime.protocol.events import BeginBatch, ChunkKey, CloseBatch, Dropped, Loaded, Took, TrainerOptions
from graphft.runtime.queue.async_queue import Ledgers
from graphft.runtime.roles.programs import buckets_of, push_timeout_of
from graphft.runtime.roles.trainer.shard_link import POLL_SECONDS, ShardLink
from graphft.runtime.roles.trainer.view import Quarantine
from graphft.runtime.transport.buffers import unpack


@dataclass(eq=False, repr=False)
class AsyncComm(ShardLink, CommPort, Ledgers):
    """The CommPort of an async trainer, and its queue's view of the shards' ledgers."""

    quarantine: Quarantine

    def __post_init__(self) -> None:
        super().__post_init__()
        self._answer_seconds = push_timeout_of(self.program)
        me, buckets = self.member, buckets_of(self.program, self.member.config.pservers)
        options = TrainerOptions(me.id, buckets, run=me.job.run_id, secret=me.secret, retry_interval=1.0)
        self.machine = AsyncTrainer(options)
        self.shards.machine = self.machine

    @property
    def interrupted(self) -> bool:
        """True if this trainer is to end, or to give its work away, and hence waits for nothing that may take long."""
        return self.state.leaving or self.member.view.over or self.quarantine.sidelined()

    def begin(self, work: ChunkWork) -> None:
        """Begins the contribution of this batch, or unit."""
        self.begin_contribution()
        self.do(BeginBatch((work.pass_index, work.chunk), work.batch))

    # -- Ledgers ------------------------------------------------------------------------------------------------

    def took(self, key: ChunkKey, batches: int, discarded: frozenset[int]) -> None:
        self.do(Took(key, batches, discarded))

    def dropped(self, key: ChunkKey) -> None:
        self.do(Dropped(key))

    def await_ledgers(self, key: ChunkKey) -> None:
        """Waits until the shards have answered what they have of a chunk; not longer than for any other answer."""
        end = time.monotonic() + self._answer_seconds
        self.take_in(0)
        while not self.machine.known(key) and time.monotonic() < end:
            if self.interrupted:
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

    # -- CommPort -----------------------------------------------------------------------------------------------

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        self.take_in(0)
        while not self.machine.has(shard, bucket):
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)
        frame = self.machine.frame(shard, bucket)
        if frame is not None:
            unpack(frame, tensors, slices)
            self.do(Loaded(shard, bucket, refresh))

    def end_pull(self, shards: int) -> None:
        while self.machine.answered() < shards:
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        if self.machine.lacks(shard):
            self.send(shard, bucket, tensors, slices, check)  # if it takes no data, the barrier gives it its time
        elif check:  # it has the batch, but whether that is finite concerns the others
            values = torch.cat([t.reshape(-1)[a:b] for t, (a, b) in zip(tensors, slices, strict=True)])
            self.check.look_at_bucket(shard, bucket, values, tensors)

    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None:
        work = self.state.work
        assert work is not None
        what = f"batch {work.batch} of chunk {work.chunk} in pass {work.pass_index}"
        finite = self.decide(on_nonfinite, what)
        self.do(CloseBatch(push_timeout, max_skipped, finite, self.reported()))
        end = time.monotonic() + push_timeout
        while self.machine.settled() < shards:
            if self.interrupted and time.monotonic() > end:
                raise WorkChanged
            self.pump(POLL_SECONDS)
