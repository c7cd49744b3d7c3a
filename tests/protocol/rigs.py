"""State machines under test: fed event by event, invariants checked after each."""

from __future__ import annotations

from typing import Any

from graphft.runtime.protocol.events import (
    Count,
    FromShard,
    Received,
    Reply,
    Send,
    ShardUp,
    SlotGained,
    Started,
    SyncOptions,
    TrainerOptions,
)
from graphft.runtime.protocol.messages import Empty, Hello, Parameters, Pull, Push, Refused, Welcome
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.protocol.sync_trainer import SyncTrainer


class Rig:
    """A machine and its clock."""

    def __init__(self, machine: Any) -> None:
        self.machine, self.now = machine, 0.0

    def feed(self, *events: Any) -> list[Any]:
        effects = []
        for event in events:
            effects += self.machine.step(event, self.now)
            self.machine.check_invariants()
        return effects

    def pass_time(self, seconds: float, *events: Any) -> list[Any]:
        self.now += seconds
        return self.feed(*events)


class ShardRig(Rig):
    """A sync shard of two slots and two buckets, with peers "a" and "b" introduced."""

    def __init__(self, *, generation: int = 0, version: int = 0, **options: Any) -> None:
        defaults: dict[str, Any] = dict(shard=0, shards=1, slots=2, buckets=(0, 1), total_steps=10, run="j")
        super().__init__(
            SyncShard(SyncOptions(**(defaults | options)), incarnation="i0", generation=generation, version=version)
        )
        self.started = self.feed(Started())
        self.feed(Received("a", Hello("j", "a")), Received("b", Hello("j", "b")))

    def push(
        self,
        peer: str,
        step: int,
        slot: int,
        bucket: int,
        *,
        want: bool = False,
        samples: int = 4,
        generation: int | None = None,
        payload: Any = "",
    ) -> list[Any]:
        generation = self.machine.generation if generation is None else generation
        payload = f"{step}.{slot}.{bucket}" if payload == "" else payload
        return self.feed(Received(peer, Push(generation, step, slot, bucket, samples, want), payload))

    def contribute(self, peer: str, step: int, slot: int, *, want: bool = False) -> list[Any]:
        return [e for b in self.machine.options.buckets for e in self.push(peer, step, slot, b, want=want)]

    def empty(self, peer: str, step: int, slot: int, *, want: bool = False) -> list[Any]:
        return self.feed(Received(peer, Empty(self.machine.generation, step, slot, want)))

    def pull(self, peer: str, version: int, bucket: int = 0) -> list[Any]:
        return self.feed(Received(peer, Pull(self.machine.generation, version, bucket)))

    def run_round(self) -> list[Any]:
        """Closes and applies the current step, with both slots from "a"."""
        step = self.machine.version
        return [*self.contribute("a", step, 0), *self.contribute("a", step, 1)]


class TrainerRig(Rig):
    """A sync trainer of two shards with one bucket each, "A" and "B", both welcome at `version`; it holds `slots`."""

    def __init__(self, slots: tuple[int, ...] = (0,), *, version: int = 0, generation: int = 0, **options: Any) -> None:
        defaults: dict[str, Any] = dict(trainer="t", buckets=((0,), (0,)), total_steps=10, run="j")
        super().__init__(SyncTrainer(TrainerOptions(**(defaults | options)), generation=generation))
        self.effects = self.feed(ShardUp(0, "A"), ShardUp(1, "B"))
        self.welcome(0, "A", version)
        self.welcome(1, "B", version)
        for slot in slots:
            self.gain(slot, version)

    def welcome(self, shard: int, incarnation: str, version: int, generation: int | None = None) -> list[Any]:
        generation = self.machine.generation if generation is None else generation
        return self.feed(FromShard(shard, Welcome(shard, incarnation, generation, version)))

    def gain(self, slot: int, *versions: int) -> list[Any]:
        """Gains a slot; the shards (all at the last of the versions given) say where they are."""
        effects = self.feed(SlotGained(slot))
        for shard in range(len(self.machine.connections)):
            version = versions[min(shard, len(versions) - 1)]
            effects += self.welcome(shard, self.machine.connections[shard].incarnation, version)
        return effects

    def bucket(self, shard: int, version: int, bucket: int = 0) -> list[Any]:
        return self.feed(FromShard(shard, Parameters(self.machine.generation, version, bucket), f"{shard}@{version}"))

    def refused(self, shard: int, code: str, version: int, generation: int | None = None) -> list[Any]:
        generation = self.machine.generation if generation is None else generation
        return self.feed(FromShard(shard, Refused(code, "because", generation, version)))


def of(kind: type, effects: list[Any]) -> list[Any]:
    """The effects of this kind; Reply and Send by the kind of their message."""
    return [e for e in effects if isinstance(e, kind) or (isinstance(e, Reply | Send) and isinstance(e.message, kind))]


def counted(effects: list[Any]) -> list[str]:
    return [e.name for e in effects if isinstance(e, Count)]


def codes(effects: list[Any]) -> list[str]:
    """The codes of the refusals among the effects."""
    return [e.message.code for e in of(Refused, effects)]
