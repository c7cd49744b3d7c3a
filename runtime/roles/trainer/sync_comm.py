"""A sync trainer's side of the data plane."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from graphft.ops.context import CommPort, Context, OnNonfinite, Slices, WorkChanged
from graphft.runtime.protocol.events import Begin, Closed, Copied, Rollback, SlotLost, TrainerOptions, Work
from graphft.runtime.protocol.machine import Event
from graphft.runtime.protocol.sync_trainer import SyncTrainer
from graphft.runtime.queue.sync_queue import SyncQueue
from graphft.runtime.roles.programs import buckets_of
from graphft.runtime.roles.trainer.shard_link import POLL_SECONDS, ShardLink
from graphft.runtime.roles.trainer.state import SyncShards
from graphft.runtime.transport.buffers import unpack

log = logging.getLogger("graphft")

STALL_SECONDS = 5.0
"""After a wait without progress for this time the shards are met again: what was sent may have been lost."""
LOOK_SECONDS = 1.0
"""The longest wait that the time between two looks counts as: the main thread may have computed for longer, or have
been without the interpreter's lock."""


@dataclass(eq=False, repr=False)
class SyncComm(ShardLink, CommPort):
    """The CommPort of a sync trainer. `queue` hears of lost slots, and when the job goes back."""

    shards: SyncShards
    ctx: Context
    queue: SyncQueue

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lowest, self._waited, self._looked = 0, 0.0, time.monotonic()
        self._stall = STALL_SECONDS
        me, config = self.member, self.member.config
        buckets = buckets_of(self.program, config.pservers)
        self._options = TrainerOptions(me.id, buckets, config.total_steps, me.job.run_id, me.secret)

    @property
    def interrupted(self) -> bool:
        return self.state.leaving or self.member.view.over or self.shards.work_changed

    def begin(self) -> Work | None:
        """Begins the next work, and returns it; None when there is nothing to do now."""
        self.take_in(0)
        if self.shards.machine is None:
            return None
        self.begin_contribution()
        self.do(Begin())
        return self.shards.machine.current

    def pump(self, seconds: float) -> None:
        super().pump(seconds)
        if self.shards.machine is not None:
            self._watch_progress(self.shards.machine)

    def await_shards(self, count: int) -> None:
        """Waits until `count` shards have reached the step. Raises WorkChanged."""
        machine = self._machine()
        while machine.reached() < count:
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)

    def _machine(self) -> SyncTrainer:
        assert self.shards.machine is not None
        return self.shards.machine

    def control(self, event: Event) -> None:
        shards = self.shards
        if isinstance(event, Rollback) and shards.machine is None:
            shards.machine = SyncTrainer(self._options, generation=event.generation)
            return
        if isinstance(event, Rollback):
            self.queue.rolled_back()
            log.info("generation %d: back to step %d", event.generation, event.step)
        if isinstance(event, SlotLost) and event.slot in shards.slots() and shards.claim_of(event.slot) <= event.claim:
            self.queue.lost(event.slot)
        if shards.machine is not None:  # the job's first generation comes before everything else
            self.do(event)

    def _watch_progress(self, machine: SyncTrainer) -> None:
        """After a stall, meets the slowest shards again: contributions that were lost are then made again."""
        lowest, now = machine.lowest(), time.monotonic()
        self._waited, self._looked = self._waited + min(now - self._looked, LOOK_SECONDS), now
        if lowest is None or not machine.slots or lowest != self._lowest:
            if lowest is not None:
                self._lowest, self._waited, self._stall = lowest, 0.0, STALL_SECONDS
            return
        paused = self.state.paused is not None and lowest >= self.ctx.step  # else a step of the pass before is not done
        if self._waited < self._stall or machine.finished or paused:
            return
        self._waited, self._stall = 0.0, min(2 * self._stall, 60.0)
        self.state.counters["stalls"] += 1
        log.debug("the story so far:\n%s", "\n".join(list(machine.story)[-40:]))
        for shard, connection in enumerate(machine.connections):
            if connection.introduced and connection.version == lowest:
                log.info("no progress at version %d; asking shard %d whether it has all of ours", lowest, shard)
                self.reconnect(shard)

    # -- CommPort -----------------------------------------------------------------------------------------------

    def pull(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, refresh: bool) -> None:
        machine = self._machine()
        while not machine.has(shard, bucket) or machine.work_changed:
            if self.interrupted:
                raise WorkChanged
            self.pump(POLL_SECONDS)
        frame = machine.frame(shard, bucket)
        if frame is not None:
            unpack(frame, tensors, slices)
            self.do(Copied(shard, bucket, self.ctx.step, refresh))

    def end_pull(self, shards: int) -> None:
        self.await_shards(shards)

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> None:
        if not self.send(shard, bucket, tensors, slices, check):
            raise WorkChanged  # once the shard is met again, the step is done again

    def end_push(self, shards: int, push_timeout: float, max_skipped: int, on_nonfinite: OnNonfinite) -> None:
        if not self.check.finite and self._machine().work_changed:
            raise WorkChanged  # it may be of a history that is over, and is not to be acted upon
        work, what = self.state.work, f"step {self.ctx.step}, slot {self.ctx.slot}"
        if work is not None:
            what += f" (batch {work.batch} of chunk {work.chunk} in pass {work.pass_index})"
        finite = self.decide(on_nonfinite, what)
        self.do(Closed(shards, finite, self.reported()))
