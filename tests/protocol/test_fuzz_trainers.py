"""Anything that a shard may say, in any state of a trainer: it goes on, or says `Fail`; nothing raises."""

from __future__ import annotations

from typing import Any, get_args

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphft.runtime.protocol.events import (
    Begin,
    BeginBatch,
    CloseBatch,
    Closed,
    Copied,
    Dropped,
    Fail,
    FromShard,
    Loaded,
    Pushed,
    Rollback,
    Send,
    ShardDown,
    ShardUp,
    SlotGained,
    SlotLost,
    Tick,
    Took,
)
from graphft.runtime.protocol.ledger import ALL
from graphft.runtime.protocol.messages import BatchAck, Code, Ledger, Parameters, Refused, Welcome
from graphft.runtime.protocol.trainer import FRAMES
from tests.protocol.fuzz import SEEDS, check_sent, messages
from tests.protocol.rigs import TrainerRig, of
from tests.protocol.test_async_trainer import Rig as AsyncTrainerRig

FAULTS = st.sampled_from([""] * 9 + ["wrong size"])
SHARDS = st.integers(0, 1)
BUCKETS = ((0, 1), (0,))
STEPS, BATCHES = 4, 3
VERSIONS = st.integers(0, STEPS)
GENERATIONS = st.integers(-1, 1)


class Trainer(RuleBasedStateMachine):
    """The rules of both modes. A trainer that fails ends; another one begins."""

    def new(self) -> None:
        raise NotImplementedError

    def feed(self, *events: Any) -> list[Any]:
        effects = self.rig.feed(*events)
        for send in of(Send, effects):
            check_sent(send.message)
        if of(Fail, effects):
            self.new()
        return effects

    @property
    def trainer(self) -> Any:
        return self.rig.machine

    @initialize(refresh=st.booleans())
    def start(self, refresh: bool) -> None:
        self.refresh = frozenset({(0, 1)} if refresh else ())
        self.new()

    def hear(self, shard: int, message: Any, payload: Any = None) -> None:
        self.feed(FromShard(shard, message, payload))

    @rule(shard=SHARDS, seed=SEEDS, fault=FAULTS)
    def noise(self, shard: int, seed: int, fault: str) -> None:
        for message, payload in messages(seed, Welcome, Parameters, Refused, Ledger, BatchAck):
            self.feed(FromShard(shard, message, payload, fault))

    @rule(shard=SHARDS, incarnation=st.sampled_from("ABC"), ahead=GENERATIONS, version=VERSIONS)
    def welcome(self, shard: int, incarnation: str, ahead: int, version: int) -> None:
        self.hear(shard, Welcome(shard, incarnation, max(0, self.generation(shard) + ahead), version))

    @rule(shard=SHARDS, bucket=st.integers(0, 1), ahead=GENERATIONS, version=VERSIONS)
    def bucket(self, shard: int, bucket: int, ahead: int, version: int) -> None:
        self.hear(shard, Parameters(max(0, self.generation(shard) + ahead), version, bucket), b"frame")

    @rule(shard=SHARDS, code=st.sampled_from(get_args(Code)), ahead=GENERATIONS, version=st.integers(-1, STEPS))
    def refused(self, shard: int, code: str, ahead: int, version: int) -> None:
        self.hear(shard, Refused(code, "because", self.generation(shard) + ahead, version))

    def generation(self, shard: int) -> int:
        raise NotImplementedError

    @rule(shard=SHARDS, incarnation=st.sampled_from("ABC"))
    def up(self, shard: int, incarnation: str) -> None:
        self.feed(ShardUp(shard, incarnation))

    @rule(shard=SHARDS)
    def down(self, shard: int) -> None:
        self.feed(ShardDown(shard))

    @rule(seconds=st.sampled_from([0.6, 6.0]))
    def tick(self, seconds: float) -> None:
        self.rig.now += seconds
        self.feed(Tick())


class SyncTrainerFuzz(Trainer):
    def new(self) -> None:
        self.tensors: set[tuple[int, int]] = set()
        self.rig = TrainerRig(buckets=BUCKETS, total_steps=STEPS)

    def generation(self, shard: int) -> int:
        return self.trainer.generation

    @rule(slot=st.integers(0, 1), gained=st.booleans())
    def slots(self, slot: int, gained: bool) -> None:
        self.feed(SlotGained(slot) if gained else SlotLost(slot))

    @rule(step=VERSIONS, ahead=st.integers(0, 1))
    def rollback(self, step: int, ahead: int) -> None:
        self.feed(Rollback(self.trainer.generation + ahead, step))

    @rule()
    def begin(self) -> None:
        self.feed(Begin())

    @precondition(lambda self: hasattr(self, "rig") and self.trainer.current is not None)
    @rule(empty=st.booleans())
    def compute(self, empty: bool) -> None:
        work = self.trainer.current
        keys = [(s, b) for s, buckets in enumerate(BUCKETS) for b in buckets]
        if self.trainer.work_changed or not all(self.trainer.has(s, b) for s, b in keys):
            return
        for s, b in keys:
            if self.trainer.frame(s, b) is not None:
                self.feed(Copied(s, b, work.step, (s, b) in self.refresh))
                self.tensors.add((s, b))
            assert (s, b) in self.tensors, "there were parameters to compute from"
        self.feed(*[Pushed(s, b, 4, b"gradient") for s, b in ([] if empty else keys)], Closed(len(BUCKETS)))

    @invariant()
    def questions_have_answers_and_what_is_kept_has_a_bound(self) -> None:
        if not hasattr(self, "rig"):
            return
        trainer = self.trainer
        assert trainer.work_changed in (True, False)
        assert 0 <= trainer.reached() <= len(BUCKETS)
        assert (trainer.lowest() or 0) in range(STEPS + 1)
        work = trainer.next_work()
        assert work is None or (work.slot in trainer.slots and 0 <= work.step < STEPS)
        assert all(len(cache.frames) <= FRAMES for cache in trainer.caches.values())
        assert len(trainer.pending) <= 3 * (STEPS + 2)


class AsyncTrainerFuzz(Trainer):
    KEYS = ((0, 0), (0, 1))

    def new(self) -> None:
        """Both shards have welcomed it, and given their buckets."""
        self.tensors: set[tuple[int, int]] = set()
        self.rig: Any = AsyncTrainerRig()
        for shard, buckets in enumerate(BUCKETS):
            self.feed(ShardUp(shard, "A"), FromShard(shard, Welcome(shard, "A", 0, 0)))
            self.feed(*[FromShard(shard, Parameters(0, 0, b), b"frame") for b in buckets])
        self.feed(Took(self.KEYS[0], BATCHES))

    def generation(self, shard: int) -> int:
        return max(0, self.trainer.connections[shard].generation)

    @rule(key=st.sampled_from(KEYS), took=st.booleans())
    def chunk(self, key: tuple[int, int], took: bool) -> None:
        self.feed(Took(key, BATCHES) if took else Dropped(key))

    @rule(shard=SHARDS, chunk=st.integers(0, 2), batch=st.integers(-1, BATCHES), version=VERSIONS, fresh=st.booleans())
    def ack(self, shard: int, chunk: int, batch: int, version: int, fresh: bool) -> None:
        self.hear(shard, BatchAck(0, chunk, batch, version, fresh))

    @rule(shard=SHARDS, chunk=st.integers(0, 2), ranges=st.sampled_from([[], [(0, 1)], [(0, 1), (2, 3)], [(0, ALL)]]))
    def ledger(self, shard: int, chunk: int, ranges: list[tuple[int, int]]) -> None:
        self.hear(shard, Ledger(0, chunk, ranges))

    @rule(key=st.sampled_from(KEYS), last=st.integers(-1, BATCHES), limit=st.integers(-1, 1))
    def compute(self, key: tuple[int, int], last: int, limit: int) -> None:
        trainer = self.trainer
        batch = trainer.next_batch(key, last) if key in trainer.held else None
        if batch is None:
            return
        assert 0 <= batch < BATCHES
        self.feed(BeginBatch(key, batch))
        keys = [(s, b) for s, buckets in enumerate(BUCKETS) for b in buckets]
        if not all(trainer.has(s, b) for s, b in keys):
            return
        for s, b in keys:
            if trainer.frame(s, b) is not None:
                self.feed(Loaded(s, b, (s, b) in self.refresh))
                self.tensors.add((s, b))
            assert (s, b) in self.tensors, "there were parameters to compute from"
        for s, b in keys:
            if trainer.lacks(s):
                self.feed(Pushed(s, b, 4, b"gradient"))
        self.feed(CloseBatch(1.0, limit))

    @invariant()
    def questions_have_answers_and_what_is_kept_has_a_bound(self) -> None:
        if not hasattr(self, "rig"):
            return
        trainer = self.trainer
        assert 0 <= trainer.settled() <= len(trainer.connections)
        assert trainer.newest() >= 0
        assert len(trainer.generations()) == 2
        for key, held in trainer.held.items():
            assert trainer.known(key) == (not held.unknown)
            assert trainer.whole(key) == (trainer.progress(key) == BATCHES)
            assert all(lacks <= set(range(BATCHES)) for lacks in held.lacks)
        for connection in trainer.connections:
            assert all(key in trainer.held and 0 <= batch < BATCHES for key, batch in connection.skipped)


TestSyncTrainerFuzz = SyncTrainerFuzz.TestCase
TestSyncTrainerFuzz.settings = settings(max_examples=100, stateful_step_count=40)
TestAsyncTrainerFuzz = AsyncTrainerFuzz.TestCase
TestAsyncTrainerFuzz.settings = settings(max_examples=100, stateful_step_count=40)
