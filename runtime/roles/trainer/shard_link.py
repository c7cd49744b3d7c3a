"""A trainer's connections to its shards: the protocol's state machine between the block's ops and ZeroMQ."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphft.errors import GraphftError, UsageError, ordinal
from graphft.ir import Program
from graphft.ops.context import OnNonfinite, Slices, WorkChanged
from graphft.runtime.coordination.member import Member
from graphft.runtime.process.work_record import WorkRecord
from graphft.runtime.protocol.events import Count, Fail, FromShard, Pushed, Send, ShardDown, ShardUp, Tick
from graphft.runtime.protocol.machine import Event
from graphft.runtime.protocol.messages import AnyMessage, BatchPush, Parameters, Push
from graphft.runtime.protocol.round import means_of
from graphft.runtime.roles.logs import tell_event
from graphft.runtime.roles.programs import received_buckets
from graphft.runtime.roles.trainer.finite_check import RULE, FiniteCheck, NonFinite
from graphft.runtime.roles.trainer.state import KnownShards, TrainerState
from graphft.runtime.transport import ClientTransport
from graphft.runtime.transport.buffers import BucketBuffers, CopyStream, DeviceBucket, as_tensor, fault_of, unpack

log = logging.getLogger("graphft")

POLL_SECONDS = 0.25
BUFFER_SECONDS = 60.0


class Leaving(NamedTuple):
    """A bucket of a contribution. `copied`: the event at which `frame` is whole; None if it is."""

    shard: int
    bucket: int
    tensors: Sequence[Tensor]
    check: bool
    samples: int
    frame: memoryview
    copied: torch.Event | None


@dataclass(eq=False, repr=False)
class ShardLink:
    """Used by the trainer's main thread only; events that other threads find come through `state.control`, in order."""

    member: Member
    transport: ClientTransport
    state: TrainerState
    work_record: WorkRecord
    shards: KnownShards
    program: Program
    check: FiniteCheck

    def __post_init__(self) -> None:
        self._sizes = received_buckets(self.program)
        self._buffers: dict[tuple[int, int], BucketBuffers] = {}
        self._arrivals: dict[tuple[int, int], DeviceBucket] = {}
        self._copies: CopyStream | None = None
        self._leaving: deque[Leaving] = deque()
        """Buckets of the contribution at hand that are on their way from the accelerator."""
        self._loss: Tensor | None = None
        self._addresses: dict[int, str] = {}
        self._met = 0
        self._reports: list[tuple[int, tuple[float, ...]]] = []
        """Samples and values of each batch of the contribution at hand."""

    @property
    def interrupted(self) -> bool:
        """True when the work at hand is to be left: this trainer is to go, the job is over, or the work has changed."""
        raise NotImplementedError

    # -- events in ----------------------------------------------------------------------------------------------

    def pump(self, seconds: float) -> None:
        """Takes in what has arrived; waits up to `seconds` for it."""
        with self.work_record.waiting():
            self.take_in(seconds)
        if self.shards.machine is not None:
            self.do(Tick())
        if not self.shards.silent():
            self.state.pumped = time.monotonic()

    def take_in(self, seconds: float) -> None:
        self.member.check_lease()
        self.member.progress.beat()
        self._take_in_control()
        reply = self.transport.receive(seconds)
        while reply is not None:
            if self.shards.machine is not None:
                self.do(FromShard(*reply, self._fault(*reply)))
            reply = self.transport.receive(0)
        self._take_in_control()
        if (met := self.shards.met()) != self._met:
            self._met = met
            self.member.changed.set()  # the daemon thread claims slots for a trainer that has met all shards

    def _fault(self, shard: int, message: AnyMessage, frame: memoryview | None) -> str:
        """Says what is wrong with the frame of a bucket, before anything looks into it."""
        if isinstance(message, Parameters) and (shard, message.bucket) in self._sizes:
            return fault_of(frame, *self._sizes[shard, message.bucket])
        return ""

    def _take_in_control(self) -> None:
        while self.state.control:
            event = self.state.control.popleft()
            if isinstance(event, ShardUp):
                self._addresses[event.shard] = self.state.addresses[event.incarnation]
                self.transport.connect(event.shard, self._addresses[event.shard])
            elif isinstance(event, ShardDown):
                self.transport.disconnect(event.shard)
            self.control(event)

    def control(self, event: Event) -> None:
        """Takes in an event that the daemon thread found."""
        self.do(event)

    def reconnect(self, shard: int) -> None:
        """Meets a shard anew: what was sent may have been lost on the way."""
        incarnation = self.shards.machine.connections[shard].incarnation
        self.transport.connect(shard, self._addresses[shard])
        self.do(ShardDown(shard))
        self.do(ShardUp(shard, incarnation))

    # -- effects out --------------------------------------------------------------------------------------------

    def do(self, event: Event) -> None:
        """Has the machine take in an event, and carries out what it decides."""
        effects = self.shards.machine.step(event, time.monotonic())
        tell_event(event, effects)
        for effect in effects:
            if isinstance(effect, Send):
                message = effect.message
                sent = self.transport.send(effect.shard, message, effect.payload)
                if isinstance(message, (Push, BatchPush)):
                    self._buffers[effect.shard, message.bucket].pin(sent)
            elif isinstance(effect, Count):
                self.state.counters[effect.name] += 1
                log.debug("%s: %s", effect.name, effect.reason)
            elif isinstance(effect, Fail):
                raise UsageError(
                    effect.reason, rule="foreign-job", help="start all roles from one job directory, with one etcd"
                )

    def send(self, shard: int, bucket: int, tensors: Sequence[Tensor], slices: Slices, check: bool) -> bool:
        """Packs a bucket of gradients and hands it to the machine, which sends it. Waits for a shard that takes no
        data, and meets it anew at last; returns False then. `check`: the bucket must be finite."""
        key = (shard, bucket)
        if key not in self._buffers:
            self._buffers[key] = BucketBuffers(tensors, slices, stream=self._stream_of(tensors[0]))
        try:
            frame = self._pack(self._buffers[key], tensors)
        except GraphftError as error:
            if error.rule != "buffer-in-use":
                raise
            self.state.counters["stuck"] += 1
            self.reconnect(shard)
            return False
        copied = self._buffers[key].copied
        self._leaving.append(Leaving(shard, bucket, tensors, check, self.state.batch_samples, frame, copied))
        self.hand_over()
        return True

    def hand_over(self, *, wait: bool = False) -> None:
        """Hands the machine the buckets that are wholly copied, in order; with `wait`, all of them."""
        while self._leaving and (wait or (copied := self._leaving[0].copied) is None or copied.query()):
            one = self._leaving.popleft()
            if one.copied is not None:
                one.copied.synchronize()
            if one.check:
                values = as_tensor(one.frame, one.tensors[0].dtype)
                self.check.look_at_bucket(one.shard, one.bucket, values, one.tensors)
            self.do(Pushed(one.shard, one.bucket, one.samples, one.frame))
        if wait and self._loss is not None:
            self.check.look_at_loss(self._loss)
            self._loss = None

    def load(self, shard: int, bucket: int, frame: memoryview, tensors: Sequence[Tensor], slices: Slices) -> None:
        """Copies a bucket that was received into the slices of the tensors, wherever they are."""
        stream = self._stream_of(tensors[0])
        if stream is None:
            unpack(frame, tensors, slices)
            return
        if (shard, bucket) not in self._arrivals:
            numel = sum(end - start for start, end in slices)
            self._arrivals[shard, bucket] = DeviceBucket(stream, numel, tensors[0].dtype)
        self._arrivals[shard, bucket].unpack(frame, tensors, slices)

    def _stream_of(self, tensor: Tensor) -> CopyStream | None:
        """Returns the stream of copies from and to the accelerator that a tensor is on; None if it is on the host."""
        if tensor.is_cpu:
            return None
        if self._copies is None:
            self._copies = CopyStream(tensor.device)
        return self._copies

    def check_loss(self, loss: Tensor) -> None:
        if loss.is_cpu or self.state.unit is not None:
            self.check.look_at_loss(loss)
        else:
            self._loss = loss  # looked at with the last bucket: backward need not wait for it

    def report(self, values: Sequence[Tensor]) -> None:
        self._reports.append((self.state.batch_samples, tuple(map(float, values))))

    def reported(self) -> tuple[float, ...]:
        """Returns the values that the contribution at hand reports: of a unit, means over its samples."""
        return means_of(self._reports)

    def begin_contribution(self) -> None:
        self._leaving.clear()
        self._loss = None
        self.check.begin()
        self._reports = []

    def decide(self, on_nonfinite: OnNonfinite, what: str) -> bool:
        """Returns True if the contribution that ends now, `what` in words, is finite. Raises NonFinite if the job is to
        stop because it is not."""
        check = self.check
        if on_nonfinite == "warn":
            loss = next(iter(self.reported()), 0.0)
            if not math.isfinite(loss) and check.worth_telling():
                text = f"{what}: the loss is {loss} (the {ordinal(check.told)} that is not finite)"
                self.member.events.emit("nonfinite", f'{text}; training goes on with it: on_nonfinite="warn"')
            return True
        if check.finite:
            return True
        if on_nonfinite == "stop":
            raise NonFinite(
                f"{what}: {check.describe()}",
                rule=RULE,
                help="see which values cause it (`graphft replay --job FOLDER --step N` computes a step of a sync job "
                "again); correct the data or the model, take a lower learning rate or clip the gradients; the option "
                'on_nonfinite="skip" leaves such steps out and counts them',
            )
        self.state.counters["nonfinite"] += 1
        if check.worth_telling():
            self.member.events.emit(
                "nonfinite",
                f"{what}: {check.describe()}; the update is left out "
                f"(of this trainer's contributions, the {ordinal(check.told)} that is not finite)",
                loss=str(check.loss),
                gradients=check.gradients,
                columns=check.inputs,
            )
        return False

    def _pack(self, buffers: BucketBuffers, tensors: Sequence[Tensor]) -> memoryview:
        """Returns the bucket's frame. Waits for a shard that takes no data as for any answer: it may be gone meanwhile.
        Raises GraphftError (rule buffer-in-use) after BUFFER_SECONDS, WorkChanged when this trainer was asked to
        leave."""
        end = time.monotonic() + BUFFER_SECONDS
        while True:
            try:
                return buffers.pack(tensors, POLL_SECONDS)
            except GraphftError as error:
                if error.rule != "buffer-in-use" or time.monotonic() > end:
                    raise
                if self.state.leaving:
                    raise WorkChanged from None
                self.pump(0)
