"""A trainer's side of the data plane, as far as sync and async mode share it: the protocol's state machine between the
block's ops and ZeroMQ."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphft.errors import GraphftError, UsageError
from graphft.runtime.protocol.async_events import AsyncTrainerEvent
from graphft.runtime.protocol.events import Count, Tick
from graphft.runtime.protocol.messages import AnyMessage, BatchPush, Parameters, Push
from graphft.runtime.protocol.sync_events import (
    Fail,
    FromShard,
    Pushed,
    Send,
    ShardDown,
    ShardUp,
    TrainerControl,
    TrainerEvent,
)
from graphft.runtime.roles.limits import received_buckets
from graphft.runtime.roles.logs import tell_event
from graphft.runtime.roles.role import log
from graphft.runtime.transport.buffers import BucketBuffers, BucketLayout, fault_of

if TYPE_CHECKING:
    from graphft.ops.context import Slices
    from graphft.runtime.coordination.records import Registration
    from graphft.runtime.roles.trainer.trainer import Trainer

POLL_SECONDS = 0.25
BUFFER_SECONDS = 60.0
SILENT_SECONDS = 5.0


class Comm:
    """Used by the trainer's main thread only; what other threads see comes through `trainer.control`, in order.

    `machine` has `step(event, now) -> effects`; None until the job has begun.
    """

    patience = SILENT_SECONDS
    """Seconds for which a shard may leave a question open."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.transport = trainer, trainer.transport
        self.machine: Any = None
        self._sizes = received_buckets(trainer.program)
        self._buffers: dict[tuple[int, int], BucketBuffers] = {}
        self._addresses: dict[int, str] = {}
        self._met = 0
        self.pumped = time.monotonic()
        """When the main thread looked after the shards last."""

    def silent(self) -> tuple[int, ...]:
        """Shards that have answered nothing for a while though they were asked. From any thread."""
        return self.machine.silence.over(self.patience) if self.machine is not None else ()

    def meets(self, pservers: Mapping[int, Registration]) -> bool:
        """Whether each of these shards has welcomed this trainer. From any thread."""
        if self.machine is None:
            return not pservers
        connections = self.machine.connections
        return all(
            connections[s].introduced and connections[s].incarnation == record.id for s, record in pservers.items()
        )

    # -- events in, effects out ---------------------------------------------------------------------------------

    def pump(self, seconds: float) -> None:
        """Takes in what has arrived; waits up to `seconds` for something."""
        with self.trainer.waiting():
            self.take_in(seconds)
        if self.machine is not None:
            self.do(Tick())
        self.pumped = time.monotonic()

    def take_in(self, seconds: float) -> None:
        self.trainer.check_lease()
        self.trainer.progress.beat()
        self._control()
        reply = self.transport.receive(seconds)
        while reply is not None:
            if self.machine is not None:
                self.do(FromShard(*reply, self._fault(*reply)))
            reply = self.transport.receive(0)
        self._control()
        met = sum(connection.introduced for connection in self.machine.connections) if self.machine is not None else 0
        if met != self._met:
            self._met = met
            self.trainer.changed.set()  # the daemon thread claims slots for a trainer that has met all shards

    def _fault(self, shard: int, message: AnyMessage, frame: memoryview | None) -> str:
        """What is wrong with the frame of a bucket, before anything looks into it."""
        if isinstance(message, Parameters) and (shard, message.bucket) in self._sizes:
            return fault_of(frame, *self._sizes[shard, message.bucket])
        return ""

    def _control(self) -> None:
        while self.trainer.control:
            event = self.trainer.control.popleft()
            if isinstance(event, ShardUp):
                self._addresses[event.shard] = self.trainer.view_address(event)
                self.transport.connect(event.shard, self._addresses[event.shard])
            elif isinstance(event, ShardDown):
                self.transport.disconnect(event.shard)
            self.control(event)

    def control(self, event: TrainerControl) -> None:
        """Takes in an event that the daemon thread found."""
        self.do(event)

    def do(self, event: TrainerEvent | AsyncTrainerEvent) -> None:
        effects = self.machine.step(event, time.monotonic())
        tell_event(event, effects)
        for effect in effects:
            if isinstance(effect, Send):
                message = effect.message
                sent = self.transport.send(effect.shard, message, effect.payload)
                if isinstance(message, (Push, BatchPush)):
                    self._buffers[effect.shard, message.bucket].pin(sent)
            elif isinstance(effect, Count):
                self.trainer.counters[effect.name] += 1
                log.debug("%s: %s", effect.name, effect.reason)
            elif isinstance(effect, Fail):
                raise UsageError(
                    effect.reason, rule="foreign-job", help="start all roles from one job directory, with one etcd"
                )

    def reconnect(self, shard: int, incarnation: str) -> None:
        """Meets a shard anew: what was sent may have been lost on the way."""
        self.transport.connect(shard, self._addresses[shard])
        self.do(ShardDown(shard))
        self.do(ShardUp(shard, incarnation))

    # -- CommPort -----------------------------------------------------------------------------------------------

    def push(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices) -> None:
        key = (shard, bucket)
        if key not in self._buffers:
            self._buffers[key] = BucketBuffers(BucketLayout.of(tensors, slices))
        frame = self._pack(self._buffers[key], tensors)
        self.do(Pushed(shard, bucket, self.trainer.batch_samples, frame))

    def _pack(self, buffers: BucketBuffers, tensors: Sequence[Tensor]) -> memoryview:
        """The bucket's frame. A shard that takes no data is waited for as for any answer: it may be gone meanwhile.

        Raises GraphftError (rule buffer-in-use) after BUFFER_SECONDS.
        """
        end = time.monotonic() + BUFFER_SECONDS
        while True:
            try:
                return buffers.pack(tensors, POLL_SECONDS)
            except GraphftError as error:
                if error.rule != "buffer-in-use" or time.monotonic() > end:
                    raise
                self.pump(0)


def buckets_of(trainer: Trainer) -> tuple[tuple[int, ...], ...]:
    """The buckets of each shard, as block step receives them."""
    recvs = [op for op in trainer.program.blocks["step"].ops if op.type == "recv"]
    buckets: list[list[int]] = [[] for _ in range(trainer.config.pservers)]
    for op in recvs:
        buckets[op.attrs["shard"]].append(op.attrs["bucket"])
    return tuple(tuple(sorted(b)) for b in buckets)
