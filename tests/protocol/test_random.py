"""Random histories of shards: whatever comes in whatever order, each promise holds after every message, nothing
raises, and nothing is decided that a driver cannot carry out."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from graphft.runtime.protocol.async_shard import HALVES
from graphft.runtime.protocol.events import (
    ApplyBatch,
    ApplyRound,
    CheckpointAt,
    ComputePartials,
    PartialsReady,
    PeerLeft,
    Received,
    Reply,
    RequestRollback,
    Rollback,
    RoundSkipped,
    SendShard,
    TakeCheckpoint,
    Tick,
)
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.messages import (
    BatchAck,
    BatchPush,
    Empty,
    Hello,
    LedgerQuery,
    Message,
    Parameters,
    Partials,
    PartialsQuery,
    Pull,
    Push,
    Refused,
    Welcome,
)
from tests.protocol.fuzz import SEEDS, check_sent, messages
from tests.protocol.rigs import Rig, ShardRig, of
from tests.protocol.test_async_shard import AsyncRig

SLOTS, STEPS = 2, 5
PEERS = st.sampled_from("ab")
FAULTS = st.sampled_from(["", "", "", "wrong size"])


class Shard(RuleBasedStateMachine):
    """The rules of both modes: a stranger, and messages with any values."""

    EXPECTED: tuple[type[Message], ...]
    rig: Rig

    @property
    def shard(self) -> Any:
        return self.rig.machine

    def take(self, effects: list[Any]) -> None:
        raise NotImplementedError

    @rule(peer=st.sampled_from(["a", "b", "shard-1", "stranger"]), seed=SEEDS, fault=FAULTS)
    def noise(self, peer: str, seed: int, fault: str) -> None:
        for message, payload in messages(seed, *self.EXPECTED):
            known = peer in self.shard.peers
            wrong = fault or "not what a trainer computes" * isinstance(message, Push | BatchPush)
            effects = self.rig.feed(Received(peer, message, payload, wrong))
            self.take(effects)
            for reply in of(Reply, effects):
                check_sent(reply.message)
                assert reply.peer in self.shard.peers or isinstance(reply.message, Refused)
            if not known and not isinstance(message, Hello):
                assert {e.message.code for e in of(Reply, effects)} == {"unknown-peer"}

    @rule(peer=PEERS, comes_back=st.booleans())
    def leave(self, peer: str, comes_back: bool) -> None:
        self.take(self.rig.feed(PeerLeft(peer)))
        self.hello(peer)

    @rule(peer=PEERS)
    def hello(self, peer: str) -> None:
        self.take(self.rig.feed(Received(peer, Hello("j", peer))))

    @rule()
    def tick(self) -> None:
        self.take(self.rig.pass_time(0.6, Tick()))


class SyncShardMachine(Shard):
    """A sync shard between trainers that repeat, reorder, lose and come late, and rollbacks.

    A payload tells (step, slot, bucket) and is a function of them, as a gradient's bits are.
    """

    EXPECTED = (Push, Empty, Pull, PartialsQuery)

    @initialize(reduce=st.booleans(), every=st.integers(0, 2), recovery=st.booleans())
    def start(self, reduce: bool, every: int, recovery: bool) -> None:
        options = dict(reduce=reduce, checkpoint_every=every, recovery=recovery)
        self.rig: Any = ShardRig(slots=SLOTS, shards=2, total_steps=STEPS, **options)
        self.rig.feed(Received("shard-1", Hello("j", "shard-1")))
        self.versions = [0]  # of the present generation, from its beginning
        self.told: dict[str, tuple[int, int]] = {}

    def take(self, effects: list[Any]) -> None:
        """As a driver carries them out, one after the other."""
        for effect in effects:
            if isinstance(effect, ComputePartials):
                self._look_at(effect)
                self.take(self.rig.feed(PartialsReady(effect.step, "own")))
            elif isinstance(effect, ApplyRound):
                self._look_at(effect)
                assert effect.partials[:1] == ("own",) * self.shard.options.reduce
                self._advance(effect.step)
            elif isinstance(effect, RoundSkipped):
                self._advance(effect.step)
            elif isinstance(effect, RequestRollback):
                assert effect.generation == self.shard.generation
            elif isinstance(effect, TakeCheckpoint):
                assert effect.step == self.versions[-1] == self.shard.version
            elif isinstance(effect, SendShard):
                assert (self.shard.options.reduce, effect.shard) == (True, 1)
            elif isinstance(effect, Reply) and isinstance(effect.message, Parameters):
                sent = effect.message
                assert sent.generation == self.shard.generation
                assert sent.version == self.versions[-1] - (effect.source == "previous") or effect.source == "current"
                assert self.versions[-1] - 1 <= sent.version <= self.versions[-1], "its copy is there"
            elif isinstance(effect, Reply) and isinstance(effect.message, Welcome):
                new = (effect.message.generation, effect.message.version)
                assert new >= self.told.get(effect.peer, new)
                self.told[effect.peer] = new

    def _look_at(self, work: ComputePartials | ApplyRound) -> None:
        assert work.step == self.versions[-1]
        assert work.contributions
        for c in work.contributions:
            assert dict(c.payloads) == {b: f"{work.step}.{c.slot}.{b}" for b in (0, 1)}
            assert c.samples == 4
        slots = [c.slot for c in work.contributions]
        assert slots == sorted(set(slots))

    def _advance(self, step: int) -> None:
        assert step == self.versions[-1], "versions never skip, and never repeat within a generation"
        self.versions.append(step + 1)

    @rule(
        peer=PEERS,
        step=st.integers(-1, 1),
        slot=st.integers(0, SLOTS - 1),
        buckets=st.permutations([0, 1]),
        count=st.integers(1, 2),
        want=st.booleans(),
        generation=st.sampled_from([-1, 0, 0, 0]),
    )
    def push(
        self, peer: str, step: int, slot: int, buckets: list[int], count: int, want: bool, generation: int
    ) -> None:
        at = dict(want=want, generation=self.shard.generation + generation)
        step = max(0, self.shard.version + step)
        for bucket in buckets[:count]:
            self.take(self.rig.push(peer, step, slot, bucket, **at))

    @rule(peer=PEERS, step=st.integers(-1, 0), slot=st.integers(0, SLOTS - 1), want=st.booleans())
    def empty(self, peer: str, step: int, slot: int, want: bool) -> None:
        self.take(self.rig.empty(peer, max(0, self.shard.version + step), slot, want=want))

    @rule(peer=PEERS, version=st.integers(-3, 2), bucket=st.integers(0, 1))
    def pull(self, peer: str, version: int, bucket: int) -> None:
        self.take(self.rig.pull(peer, max(-1, self.shard.version + version), bucket))

    @rule(step=st.integers(-1, 1))
    def partials(self, step: int) -> None:
        step += self.shard.version
        self.take(self.rig.feed(Received("shard-1", Partials(self.shard.generation, step, 1), f"sum {step}")))

    @rule(back=st.integers(0, 3), ahead=st.integers(0, 1), asked=st.integers(-1, STEPS + 1))
    def watched(self, back: int, ahead: int, asked: int) -> None:
        step = max(0, self.shard.version - back)
        effects = self.rig.feed(Rollback(self.shard.generation + ahead, step))
        if ahead:
            self.versions = [step]
            assert not self.shard.waiting
        self.take([*effects, *self.rig.feed(CheckpointAt(asked))])

    @invariant()
    def versions_follow_the_rounds(self) -> None:
        if hasattr(self, "rig"):
            assert self.shard.version == self.versions[-1]


class AsyncShardMachine(Shard):
    """An async shard between trainers that repeat and mix; it crashes, and restarts from its checkpoint."""

    EXPECTED = (BatchPush, LedgerQuery, Pull)

    @initialize(staleness=st.sampled_from([-1, 1]))
    def start(self, staleness: int) -> None:
        self.options = dict(max_staleness=staleness, checkpoint_every=2, compensate=True)
        self.rig: Any = AsyncRig(**self.options)
        self.copies = {0}
        self.applied: set[tuple[int, int]] = set()
        self.saved: tuple[str, int, set[tuple[int, int]]] = (json.dumps(Ledger().export()), 0, set())

    @rule(
        peer=PEERS, chunk=st.integers(0, 1), batch=st.integers(0, 2), bucket=st.integers(0, 1), behind=st.integers(0, 2)
    )
    def push(self, peer: str, chunk: int, batch: int, bucket: int, behind: int) -> None:
        version = max(0, self.rig.machine.version - behind)
        at: dict[str, Any] = dict(chunk=chunk, batches=4, version=version, payload=(peer, version, bucket))
        self.take(self.rig.push(peer, batch, bucket, **at))

    def take(self, effects: list[Any]) -> None:
        for apply in of(ApplyBatch, effects):
            assert (apply.chunk, apply.batch) not in self.applied
            self.applied.add((apply.chunk, apply.batch))
            ((_, version),) = {p[:2] for p in apply.payloads.values()}
            assert apply.base in (-1, version)
            assert apply.kept | {apply.base} <= self.copies | {-1}
            self.copies = {*apply.kept, self.shard.version}
            assert self.options["max_staleness"] < 0 or apply.staleness <= self.options["max_staleness"]
        for ack in of(BatchAck, effects):
            assert (ack.message.chunk, ack.message.batch) in self.applied
        for reply in of(Parameters, effects):
            assert (reply.message.bucket in (0, 1), reply.message.version) == (True, self.shard.version)
        if of(TakeCheckpoint, effects):
            self.saved = (json.dumps(self.shard.ledger.export()), self.shard.version, set(self.applied))

    @rule()
    def crash(self) -> None:
        ledger, version, self.applied = self.saved[0], self.saved[1], set(self.saved[2])
        self.copies = {version}
        self.rig = AsyncRig(version=version, ledger=Ledger.load(json.loads(ledger)), **self.options)

    @rule(peer=PEERS)
    def pull(self, peer: str) -> None:
        self.take(self.rig.feed(Received(peer, Pull(0, -1, 0))))

    @invariant()
    def the_ledger_is_exact(self) -> None:
        if hasattr(self, "rig"):
            has = self.shard.ledger.has
            assert self.shard.version == len(self.applied)
            assert self.applied == {(c, b) for c in range(4) for b in range(4) if has(0, c, b)}
            assert len(self.shard.copies) <= HALVES * len(self.shard.peers)


TestSyncShard = SyncShardMachine.TestCase
TestSyncShard.settings = settings(max_examples=80, stateful_step_count=40)
TestAsyncShard = AsyncShardMachine.TestCase
TestAsyncShard.settings = settings(max_examples=60, stateful_step_count=40)
