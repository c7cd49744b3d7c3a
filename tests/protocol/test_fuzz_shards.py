"""Any message in any state of a shard: nothing raises, nothing is decided that its role cannot carry out."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
    RoundApplied,
    RoundSkipped,
    SendShard,
    TakeCheckpoint,
    Tick,
)
from graphft.runtime.protocol.machine import LONGEST
from graphft.runtime.protocol.messages import (
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
)
from tests.protocol.fuzz import SEEDS, check_sent, messages
from tests.protocol.rigs import Rig, ShardRig, of
from tests.protocol.test_async_shard import AsyncRig

FAULTS = st.sampled_from(["", "", "", "wrong size"])
PEERS = st.sampled_from(["a", "b", "shard-1", "stranger"])
STEPS, MAX_PEERS = 3, 3


class Shard(RuleBasedStateMachine):
    """What is fuzzed alike in both modes."""

    rig: Rig

    @property
    def shard(self) -> Any:
        return self.rig.machine

    def take(self, effects: list[Any]) -> None:
        raise NotImplementedError

    def receive(self, peer: str, message: Message, payload: Any = None, fault: str = "") -> None:
        known = peer in self.shard.peers
        effects = self.rig.feed(Received(peer, message, payload, fault))
        self.take(effects)
        for reply in of(Reply, effects):
            check_sent(reply.message)
            assert reply.peer in self.shard.peers or isinstance(reply.message, Refused)
        if not known and not isinstance(message, Hello):
            assert {e.message.code for e in of(Reply, effects)} == {"unknown-peer"}

    @rule(peer=PEERS)
    def hello(self, peer: str) -> None:
        self.receive(peer, Hello("j", "p", peer))

    @rule(peer=PEERS, version=st.integers(-1, 0), bucket=st.integers(0, 1))
    def pull(self, peer: str, version: int, bucket: int) -> None:
        self.receive(peer, Pull(self.shard.generation, max(-1, self.shard.version + version), bucket))

    @rule(peer=PEERS)
    def leave(self, peer: str) -> None:
        self.take(self.rig.feed(PeerLeft(peer)))

    @rule(seconds=st.sampled_from([0.6, 20.0]))
    def tick(self, seconds: float) -> None:
        self.take(self.rig.pass_time(seconds, Tick()))

    @invariant()
    def what_peers_make_it_keep_has_a_bound(self) -> None:
        if hasattr(self, "rig"):
            assert len(self.shard.peers) <= MAX_PEERS
            assert all(len(line) < LONGEST + 50 for line in self.shard.story.of())


class SyncShardFuzz(Shard):
    """A sync shard, with and without each option."""

    @rule(peer=PEERS, seed=SEEDS, fault=FAULTS)
    def noise(self, peer: str, seed: int, fault: str) -> None:
        for message, payload in messages(seed, Push, Empty, Pull, Partials, PartialsQuery):
            self.receive(peer, message, payload, fault)

    @initialize(
        options=st.fixed_dictionaries(
            {
                "shards": st.integers(1, 3),
                "reduce": st.booleans(),
                "recovery": st.booleans(),
                "on_barrier_timeout": st.sampled_from(["rollback", "proceed"]),
                "checkpoint_every": st.integers(0, 2),
            }
        )
    )
    def start(self, options: dict[str, Any]) -> None:
        options["reduce"] = options["reduce"] and options["shards"] > 1
        self.rig = ShardRig(total_steps=STEPS, max_peers=MAX_PEERS, **options)
        self.copies = {0}
        self.work: Any = None

    def take(self, effects: list[Any]) -> None:
        options, shard = self.shard.options, self.shard
        for effect in effects:
            if isinstance(effect, RoundSkipped):
                self._publish(effect.step + 1)
            elif isinstance(effect, ComputePartials | ApplyRound):
                self._begin(effect)
            elif isinstance(effect, SendShard):
                assert options.reduce
                assert effect.shard in set(range(options.shards)) - {options.shard}
                assert isinstance(effect.message, Partials) or effect.payload is None
                check_sent(effect.message)
            elif isinstance(effect, Reply) and isinstance(effect.message, Parameters):
                assert (effect.message.bucket in options.buckets, effect.source != "") == (True, True)
                assert effect.message.version in self.copies, "its copy is there"
            elif isinstance(effect, RequestRollback):
                assert effect.generation == shard.generation
            elif isinstance(effect, TakeCheckpoint):
                assert effect.step == shard.version

    def _begin(self, work: ComputePartials | ApplyRound) -> None:
        options = self.shard.options
        assert self.work is None
        assert work.contributions, "there is something to reduce"
        for c in work.contributions:
            assert (set(c.payloads) == set(options.buckets), c.samples >= 1) == (True, True)
            assert None not in c.payloads.values()
        assert options.reduce or isinstance(work, ApplyRound)
        if isinstance(work, ApplyRound):
            assert len(work.partials) == (options.shards if options.reduce else 0)
        self.work = work

    def _publish(self, version: int) -> None:
        """As ShardBuffers does."""
        self.copies = {v for v in self.copies if v == version - 1} | {version}

    @rule(
        peer=PEERS,
        slots=st.permutations([0, 1]),
        buckets=st.permutations([0, 1]),
        want=st.booleans(),
        empty=st.booleans(),
    )
    def contribute(self, peer: str, slots: list[int], buckets: list[int], want: bool, empty: bool) -> None:
        """A slot's part of the step, and in half of the cases the other's, too."""
        self.hello(peer)
        for slot in slots[: 1 + want]:
            for bucket in buckets:
                self.receive(peer, Push(self.shard.generation, self.shard.version, slot, bucket, 4, want), b"f")
        if empty:
            self.take(self.rig.empty(peer, self.shard.version, slots[-1]))  # type: ignore[attr-defined]

    @rule(peer=PEERS)
    def whole_round(self, peer: str) -> None:
        """What otherwise would rarely come together."""
        version = self.shard.version
        for slot in (0, 1):
            self.contribute(peer, [slot, slot], [0, 1], want=False, empty=False)
        for shard in range(1, self.shard.options.shards):
            self.receive(peer, Partials(self.shard.generation, version, shard), b"sums")
        while self.work is not None:
            self.work_done()

    @rule()
    def partials(self) -> None:
        self.hello("shard-1")
        self.receive("shard-1", Partials(self.shard.generation, self.shard.version, 1), b"sums")

    @precondition(lambda self: self.work is not None)
    @rule()
    def work_is_done(self) -> None:
        self.work_done()

    def work_done(self) -> None:
        work, self.work = self.work, None
        if isinstance(work, ComputePartials):
            self.take(self.rig.feed(PartialsReady(work.generation, work.step, b"own")))
            return
        if work.generation == self.shard.generation:
            self._publish(work.step + 1)
        self.take(self.rig.feed(RoundApplied(work.generation, work.step)))

    @rule(back=st.integers(0, 2), ahead=st.integers(0, 1), asked=st.integers(-1, STEPS + 1))
    def watched(self, back: int, ahead: int, asked: int) -> None:
        if ahead:
            self._publish(max(0, self.shard.version - back))
            self.work = None
        step = max(0, self.shard.version - back)
        self.take(self.rig.feed(Rollback(self.shard.generation + ahead, step), CheckpointAt(asked)))


class AsyncShardFuzz(Shard):
    """An async shard, with and without each option."""

    @rule(peer=PEERS, seed=SEEDS, fault=FAULTS)
    def noise(self, peer: str, seed: int, fault: str) -> None:
        for message, payload in messages(seed, BatchPush, LedgerQuery, Pull):
            self.receive(peer, message, payload, fault)

    @initialize(
        options=st.fixed_dictionaries(
            {"compensate": st.booleans(), "max_staleness": st.integers(-1, 1), "checkpoint_every": st.integers(0, 2)}
        )
    )
    def start(self, options: dict[str, Any]) -> None:
        self.rig = AsyncRig(batches=(1, 2, 3), passes=2, max_peers=MAX_PEERS, **options)
        self.copies = {0}

    def take(self, effects: list[Any]) -> None:
        shard = self.shard
        for effect in effects:
            if isinstance(effect, ApplyBatch):
                assert 0 <= effect.batch < shard.options.batches[effect.chunk]
                assert (set(effect.payloads), None in effect.payloads.values()) == ({0, 1}, False)
                assert effect.base == -1 or effect.base in self.copies, "its copy is there"
                self.copies = {v for v in self.copies if v in effect.kept or v == shard.version - 1} | {shard.version}
            elif isinstance(effect, Reply) and isinstance(effect.message, Parameters):
                assert (effect.message.bucket in (0, 1), effect.message.version) == (True, shard.version)

    @rule(
        peer=PEERS,
        chunk=st.integers(0, 2),
        batch=st.integers(0, 3),
        behind=st.integers(-1, 2),
        buckets=st.sampled_from([(0,), (1,), (0, 1)]),
    )
    def push(self, peer: str, chunk: int, batch: int, behind: int, buckets: tuple[int, ...]) -> None:
        if peer not in self.shard.peers:
            self.hello(peer)
        version = self.shard.version - behind
        for bucket in buckets:
            self.take(
                self.rig.push(
                    peer,
                    batch,
                    bucket,
                    chunk=chunk,
                    batches=chunk + 1,  # type: ignore[attr-defined]
                    version=version,
                )
            )

    @invariant()
    def what_is_kept_is_of_the_plan(self) -> None:
        if hasattr(self, "rig"):
            assert len(self.shard.copies) <= HALVES * MAX_PEERS
            applied = sum(self.shard.ledger.has(p, c, b) for p in range(2) for c in range(3) for b in range(c + 1))
            assert applied == self.shard.version
            assert all(
                int(p) < 2 and all(int(c) < 3 for c in held["partly"]) for p, held in self.shard.ledger.export().items()
            )


TestSyncShardFuzz = SyncShardFuzz.TestCase
TestSyncShardFuzz.settings = settings(max_examples=100, stateful_step_count=40)
TestAsyncShardFuzz = AsyncShardFuzz.TestCase
TestAsyncShardFuzz.settings = settings(max_examples=100, stateful_step_count=40)
