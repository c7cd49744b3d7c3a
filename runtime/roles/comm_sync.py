"""A sync trainer's side of the data plane: the protocol's state machine between the block's ops and ZeroMQ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphft.errors import GraphftError
from graphft.ops.context import WorkChanged
from graphft.runtime.protocol.events import Count, Tick
from graphft.runtime.protocol.sync_events import (
    Begin,
    Closed,
    Copied,
    Fail,
    FromShard,
    Pushed,
    Rollback,
    Send,
    ShardDown,
    ShardUp,
    TrainerOptions,
    Wake,
    Work,
)
from graphft.runtime.protocol.trainer_sync import SyncTrainer
from graphft.runtime.roles.base import log
from graphft.runtime.transport.buffers import BucketBuffers, BucketLayout, unpack

if TYPE_CHECKING:
    from graphft.ops.context import Slices
    from graphft.runtime.roles.trainer import Trainer

POLL_SECONDS = 0.25
STALL_SECONDS = 5.0
"""A wait without any progress for so long meets the shards again: what was sent may have been lost on the way."""
BUFFER_SECONDS = 60.0


class SyncComm:
    """The CommPort of a sync trainer. Used by the main thread only; what other threads see comes through
    `trainer.control`, in order."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.transport = trainer, trainer.transport
        self.machine: SyncTrainer | None = None
        self._buffers: dict[tuple[int, int], BucketBuffers] = {}
        self._addresses: dict[int, str] = {}
        self._progress = (0, time.monotonic())
        self._stall = STALL_SECONDS
        self._options = _options(trainer)

    @property
    def started(self) -> bool:
        """Whether this trainer has taken part in a step."""
        return self.trainer.ctx.step > 0

    def slots(self) -> list[int]:
        return sorted(self.machine.slots) if self.machine is not None else []

    # -- events in, effects out ---------------------------------------------------------------------------------

    def begin(self) -> Work | None:
        """The next work, begun; None when there is nothing to do now."""
        self._take_in(0)
        if self.machine is None:
            return None
        self._do(Begin())
        return self.machine.current

    def pump(self, seconds: float) -> None:
        """Takes in what has arrived; waits up to `seconds` for something."""
        self._take_in(seconds)
        if self.machine is not None:
            self._do(Tick())
            self._watch_progress()

    def await_ready(self) -> bool:
        """Before an empty contribution: waits until every shard has reached the step. False: the work changed."""
        assert self.machine is not None
        while not self.machine.ready:
            if self.machine.work_changed:
                return False
            self.pump(POLL_SECONDS)
        return True

    def _take_in(self, seconds: float) -> None:
        self.trainer.check_lease()
        self._control()
        reply = self.transport.receive(seconds)
        while reply is not None:
            if self.machine is not None:
                self._do(FromShard(*reply))
            reply = self.transport.receive(0)
        self._control()

    def _control(self) -> None:
        while self.trainer.control:
            event = self.trainer.control.popleft()
            if isinstance(event, Rollback) and self.machine is None:
                self.machine = SyncTrainer(self._options, generation=event.generation)
                continue
            if isinstance(event, Rollback):
                self.trainer.queue.rolled_back()
                log.info("generation %d: back to step %d", event.generation, event.step)
            elif isinstance(event, ShardUp):
                self._addresses[event.shard] = self.trainer.view_address(event)
                self.transport.connect(event.shard, self._addresses[event.shard])
            elif isinstance(event, ShardDown):
                self.transport.disconnect(event.shard)
            if self.machine is not None:  # the job's first epoch comes before everything else
                self._do(event)

    def _do(self, event: Any) -> None:
        assert self.machine is not None
        for effect in self.machine.step(event, time.monotonic()):
            if isinstance(effect, Send):
                sent = self.transport.send(effect.shard, effect.message, effect.payload)
                if isinstance(event, Pushed):
                    self._buffers[event.shard, event.bucket].lend(sent)
            elif isinstance(effect, Count):
                self.trainer.counters[effect.name] += 1
                log.debug("%s: %s", effect.name, effect.reason)
            elif isinstance(effect, Fail):
                raise GraphftError(effect.reason, rule="foreign-job",
                                   help="start all roles from one job directory, with one etcd")
            else:
                assert isinstance(effect, Wake)

    def _watch_progress(self) -> None:
        """After a stall, meets the slowest shards again: contributions that were lost are then made again."""
        assert self.machine is not None
        lowest, now = self.machine.lowest(), time.monotonic()
        if lowest is None or not self.machine.slots or lowest != self._progress[0]:
            if lowest is not None:
                self._progress, self._stall = (lowest, now), STALL_SECONDS
            return
        if now - self._progress[1] < self._stall or self.machine.finished:
            return
        self._progress, self._stall = (lowest, now), min(2 * self._stall, 60.0)
        self.trainer.counters["stalls"] += 1
        log.debug("the story so far:\n%s", "\n".join(self.machine.story.of()[-40:]))
        for shard, link in enumerate(self.machine.links):
            if link.introduced and link.version == lowest:
                log.info("no progress at version %d; asking shard %d whether it has all of ours", lowest, shard)
                incarnation = link.incarnation
                self.transport.connect(shard, self._addresses[shard])
                self._do(ShardDown(shard))
                self._do(ShardUp(shard, incarnation))

    @property
    def finished(self) -> bool:
        """Whether every shard has the job's last version."""
        return self.machine is not None and self.machine.finished

    def lowest(self) -> int:
        """The lowest version among the shards; -1 while that is not known."""
        lowest = self.machine.lowest() if self.machine is not None else None
        return -1 if lowest is None else lowest

    # -- CommPort -----------------------------------------------------------------------------------------------

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        machine = self.machine
        assert machine is not None
        self._take_in(0)
        while not machine.has(shard, bucket) or machine.work_changed:
            if machine.work_changed:
                raise WorkChanged
            self.pump(POLL_SECONDS)
        frame = machine.frame(shard, bucket)
        if frame is not None:
            unpack(frame, tensors, slices)
            self._do(Copied(shard, bucket, self.trainer.ctx.step))

    def end_pull(self) -> None:
        """The receives have waited for everything: each bucket is of this step's version."""

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices) -> None:
        key = (shard, bucket)
        if key not in self._buffers:
            self._buffers[key] = BucketBuffers(BucketLayout.of(tensors, slices))
        frame = self._buffers[key].pack(tensors, BUFFER_SECONDS)
        self._do(Pushed(shard, bucket, self.trainer.queue.samples, frame))

    def end_push(self) -> None:
        self._do(Closed())


def _options(trainer: Trainer) -> TrainerOptions:
    """The buckets, as block step of the trainer's program has them."""
    recvs = [op for op in trainer.program.blocks["step"].ops if op.type == "recv"]
    buckets: list[list[int]] = [[] for _ in range(trainer.config.pservers)]
    for op in recvs:
        buckets[op.attrs["shard"]].append(op.attrs["bucket"])
    refresh = frozenset((op.attrs["shard"], op.attrs["bucket"]) for op in recvs if op.attrs.get("refresh"))
    return TrainerOptions(trainer.id, tuple(tuple(sorted(b)) for b in buckets), trainer.config.total_steps,
                          trainer.config.name, trainer.job.hash, refresh)
