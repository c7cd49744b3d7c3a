"""Random histories: whatever order messages come in, each promise holds after every one of them."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphft.runtime.protocol.events import (
    ApplyBatch,
    ApplyRound,
    ComputePartials,
    PartialsReady,
    PeerLeft,
    Received,
    Rollback,
    RoundApplied,
    RoundSkipped,
    Tick,
)
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.protocol.messages import BatchAck, Hello, Parameters, Partials, Pull, Welcome
from tests.protocol.rigs import ShardRig, of
from tests.protocol.test_async_shard import AsyncRig

SLOTS, STEPS = 2, 5
PEERS = st.sampled_from("ab")


class SyncShardMachine(RuleBasedStateMachine):
    """A sync shard between trainers that repeat, reorder, lose and come late, and rollbacks.

    A payload tells (step, slot, bucket) and is a function of them, as a gradient's bits are.
    """

    @initialize(reduce=st.booleans(), every=st.integers(0, 2))
    def start(self, reduce: bool, every: int) -> None:
        self.rig = ShardRig(slots=SLOTS, shards=2, reduce=reduce, total_steps=STEPS, checkpoint_every=every)
        self.rig.feed(Received("shard-1", Hello("j", "p", "shard-1")))
        self.versions = [0]  # of the present generation, from its beginning
        self.work: ApplyRound | ComputePartials | None = None
        self.asked: set[tuple[str, int]] = set()
        self.told: dict[str, tuple[int, int]] = {}

    @property
    def shard(self) -> Any:
        return self.rig.machine

    def take(self, effects: list[Any]) -> None:
        for skipped in of(RoundSkipped, effects):
            self._advance(skipped.step)
        for work in of(ApplyRound, effects) + of(ComputePartials, effects):
            assert self.work is None
            self.work = work
            assert work.step == self.shard.version
            for c in work.contributions:
                assert dict(c.payloads) == {b: f"{work.step}.{c.slot}.{b}" for b in (0, 1)}
                assert c.samples == 4
            slots = [c.slot for c in work.contributions]
            assert slots == sorted(set(slots))
        for reply in of(Parameters, effects):
            sent = reply.message
            assert sent.generation == self.shard.generation
            assert sent.version == self.shard.version - (reply.source == "previous") or reply.source == "current"
            assert self.shard.version - 1 <= sent.version <= self.shard.version
            assert not isinstance(self.work, ApplyRound), "the parameters are being changed"
        for reply in of(Welcome, effects):
            new = (reply.message.generation, reply.message.version)
            assert new >= self.told.get(reply.peer, new)
            self.told[reply.peer] = new

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
        generation=st.integers(-1, 0),
    )
    def push(
        self, peer: str, step: int, slot: int, buckets: list[int], count: int, want: bool, generation: int
    ) -> None:
        for bucket in buckets[:count]:
            self.take(
                self.rig.push(
                    peer,
                    max(0, self.shard.version + step),
                    slot,
                    bucket,
                    want=want,
                    generation=self.shard.generation + generation,
                )
            )

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

    @precondition(lambda self: self.work is not None)
    @rule()
    def work_done(self) -> None:
        work, self.work = self.work, None
        assert work is not None
        if isinstance(work, ComputePartials):
            self.take(self.rig.feed(PartialsReady(work.generation, work.step, f"own {work.step}")))
            return
        if work.generation == self.shard.generation:
            assert work.partials in ((), (f"own {work.step}", f"sum {work.step}"))
            self._advance(work.step)
        self.take(self.rig.feed(RoundApplied(work.generation, work.step)))

    @rule(back=st.integers(0, 3), ahead=st.integers(0, 1))
    def rollback(self, back: int, ahead: int) -> None:
        step = max(0, self.shard.version - back)
        generation = self.shard.generation + ahead
        self.take(self.rig.feed(Rollback(generation, step)))
        if ahead:
            self.versions, self.work = [step], None
            assert not self.shard.waiting

    @rule(peer=PEERS, comes_back=st.booleans())
    def leave(self, peer: str, comes_back: bool) -> None:
        self.take(self.rig.feed(PeerLeft(peer), Received(peer, Hello("j", "p", peer))))

    @rule()
    def tick(self) -> None:
        self.take(self.rig.pass_time(0.6, Tick()))

    @invariant()
    def versions_follow_the_rounds(self) -> None:
        if hasattr(self, "rig"):
            assert self.shard.version == self.versions[-1]


class AsyncShardMachine(RuleBasedStateMachine):
    """An async shard between trainers that repeat and mix; it crashes, and restarts from its checkpoint."""

    @initialize(staleness=st.sampled_from([-1, 1]))
    def start(self, staleness: int) -> None:
        self.options = dict(max_staleness=staleness, checkpoint_every=2, compensate=True)
        self.rig = AsyncRig(**self.options)
        self.copies = {0}
        self.applied: set[tuple[int, int]] = set()
        self.saved: tuple[str, int, set[tuple[int, int]]] = (json.dumps(Ledger().export()), 0, set())

    @rule(
        peer=PEERS, chunk=st.integers(0, 1), batch=st.integers(0, 2), bucket=st.integers(0, 1), behind=st.integers(0, 2)
    )
    def push(self, peer: str, chunk: int, batch: int, bucket: int, behind: int) -> None:
        version = max(0, self.rig.machine.version - behind)
        effects = self.rig.push(
            peer, batch, bucket, chunk=chunk, batches=3, version=version, payload=(peer, version, bucket)
        )
        for apply in of(ApplyBatch, effects):
            assert (apply.chunk, apply.batch) not in self.applied
            self.applied.add((apply.chunk, apply.batch))
            assert {p[:2] for p in apply.payloads.values()} == {(peer, version)}
            assert apply.base in (-1, version)
            assert apply.kept | {apply.base} <= self.copies | {-1}
            self.copies = {*apply.kept, self.rig.machine.version}
            assert self.options["max_staleness"] < 0 or apply.staleness <= self.options["max_staleness"]
        for ack in of(BatchAck, effects):
            assert (ack.message.chunk, ack.message.batch) in self.applied
        if any(type(e).__name__ == "TakeCheckpoint" for e in effects):
            machine = self.rig.machine
            self.saved = (json.dumps(machine.ledger.export()), machine.version, set(self.applied))

    @rule()
    def crash(self) -> None:
        ledger, version, self.applied = self.saved[0], self.saved[1], set(self.saved[2])
        self.copies = {version}
        self.rig = AsyncRig(version=version, ledger=Ledger.load(json.loads(ledger)), **self.options)

    @rule(peer=PEERS)
    def pull(self, peer: str) -> None:
        self.rig.feed(Received(peer, Pull(0, -1, 0)))

    @rule(peer=PEERS)
    def leave(self, peer: str) -> None:
        self.rig.feed(PeerLeft(peer))
        self.rig.hello(peer)

    @rule(peer=PEERS)
    def reconnect(self, peer: str) -> None:
        self.rig.hello(peer)

    @invariant()
    def the_ledger_is_exact(self) -> None:
        if hasattr(self, "rig"):
            machine = self.rig.machine
            assert machine.version == len(self.applied)
            assert self.applied == {(c, b) for c in range(2) for b in range(3) if machine.ledger.has(0, c, b)}


TestSyncShard = SyncShardMachine.TestCase
TestSyncShard.settings = settings(max_examples=100, stateful_step_count=50)
TestAsyncShard = AsyncShardMachine.TestCase
TestAsyncShard.settings = settings(max_examples=60, stateful_step_count=40)
