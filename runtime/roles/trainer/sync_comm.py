"""A sync trainer's side of the data plane."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from graphft.errors import GraphftError
from graphft.ops.context import WorkChanged
from graphft.runtime.protocol.sync_events import (
    Begin,
    Closed,
    Copied,
    Rollback,
    SlotLost,
    TrainerControl,
    TrainerOptions,
    Work,
)
from graphft.runtime.protocol.sync_trainer import SyncTrainer
from graphft.runtime.roles.role import log
from graphft.runtime.roles.trainer.comm import POLL_SECONDS, Comm, buckets_of
from graphft.runtime.transport.buffers import unpack

if TYPE_CHECKING:
    from graphft.ops.context import Slices
    from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer

STALL_SECONDS = 5.0
"""After a wait without progress for this time the shards are met again: what was sent may have been lost."""
LOOK_SECONDS = 1.0
"""Of the time between two looks, at most so much was a wait: the main thread may have computed for longer, or have been
without the interpreter's lock."""


class SyncComm(Comm):
    """The CommPort of a sync trainer."""

    trainer: SlotTrainer
    machine: SyncTrainer | None

    def __init__(self, trainer: SlotTrainer) -> None:
        super().__init__(trainer)
        self._lowest, self._waited, self._looked = 0, 0.0, time.monotonic()
        self._stall = STALL_SECONDS
        self._options = TrainerOptions(
            trainer.id, buckets_of(trainer), trainer.config.total_steps, trainer.job.run_id, trainer.secret
        )

    @property
    def started(self) -> bool:
        """Whether this trainer has taken part in a step."""
        return self.trainer.ctx.step > 0

    def slots(self) -> list[int]:
        return sorted(self.machine.slots) if self.machine is not None else []

    def claim_of(self, slot: int) -> int:
        """The revision of the claim that a held slot is this trainer's by."""
        return self.machine.slots[slot].claim if self.machine is not None else 0

    # -- events in ----------------------------------------------------------------------------------------------

    def begin(self) -> Work | None:
        """The next work, begun; None when there is nothing to do now."""
        self.take_in(0)
        if self.machine is None:
            return None
        self.do(Begin())
        return self.machine.current

    def pump(self, seconds: float) -> None:
        super().pump(seconds)
        if self.machine is not None:
            self._watch_progress()

    def await_shards(self, count: int) -> None:
        """Waits until `count` shards have reached the step. Raises WorkChanged."""
        machine = self.machine
        assert machine is not None
        while machine.reached() < count:
            if machine.work_changed or self.trainer.leaving:
                raise WorkChanged
            self.pump(POLL_SECONDS)

    def control(self, event: TrainerControl) -> None:
        if isinstance(event, Rollback) and self.machine is None:
            self.machine = SyncTrainer(self._options, generation=event.generation)
            return
        if isinstance(event, Rollback):
            self.trainer.queue.rolled_back()
            log.info("generation %d: back to step %d", event.generation, event.step)
        if isinstance(event, SlotLost) and event.slot in self.slots() and self.claim_of(event.slot) <= event.claim:
            self.trainer.queue.lost(event.slot)
        if self.machine is not None:  # the job's first generation comes before everything else
            self.do(event)

    def _watch_progress(self) -> None:
        """After a stall, meets the slowest shards again: contributions that were lost are then made again."""
        assert self.machine is not None
        lowest, now = self.machine.lowest(), time.monotonic()
        self._waited, self._looked = self._waited + min(now - self._looked, LOOK_SECONDS), now
        if lowest is None or not self.machine.slots or lowest != self._lowest:
            if lowest is not None:
                self._lowest, self._waited, self._stall = lowest, 0.0, STALL_SECONDS
            return
        if self._waited < self._stall or self.machine.finished:
            return
        self._waited, self._stall = 0.0, min(2 * self._stall, 60.0)
        self.trainer.counters["stalls"] += 1
        log.debug("the story so far:\n%s", "\n".join(self.machine.story.of()[-40:]))
        for shard, connection in enumerate(self.machine.connections):
            if connection.introduced and connection.version == lowest:
                log.info("no progress at version %d; asking shard %d whether it has all of ours", lowest, shard)
                self.reconnect(shard, connection.incarnation)

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
        self.take_in(0)
        while not machine.has(shard, bucket) or machine.work_changed:
            if machine.work_changed or self.trainer.leaving:
                raise WorkChanged
            self.pump(POLL_SECONDS)
        frame = machine.frame(shard, bucket)
        if frame is not None:
            unpack(frame, tensors, slices)
            self.do(Copied(shard, bucket, self.trainer.ctx.step, refresh))

    def end_pull(self, shards: int) -> None:
        self.await_shards(shards)

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices) -> None:
        machine = self.machine
        assert machine is not None
        try:
            super().push(shard, bucket, tensors, slices)
        except GraphftError as error:
            if error.rule != "buffer-in-use":
                raise
            self.trainer.counters["stuck"] += 1
            self.reconnect(shard, machine.connections[shard].incarnation)
            raise WorkChanged from error  # once the shard is met again, the step is done again

    def end_push(self, shards: int, push_timeout: float, max_skipped: int) -> None:
        self.do(Closed(shards))
