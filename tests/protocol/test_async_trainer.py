"""Stories of an async trainer: what it lacks, what it waits for, what it sends again."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.protocol.async_trainer import AsyncTrainer
from graphft.runtime.protocol.events import (
    BeginBatch,
    CloseBatch,
    Count,
    Dropped,
    FromShard,
    Loaded,
    Pushed,
    Send,
    ShardDown,
    ShardUp,
    Tick,
    Took,
    TrainerOptions,
)
from graphft.runtime.protocol.ledger import ALL
from graphft.runtime.protocol.machine import IllegalTransition
from graphft.runtime.protocol.messages import (
    BatchAck,
    BatchPush,
    Hello,
    LedgerQuery,
    Parameters,
    Pull,
    Refused,
    Welcome,
)
from graphft.runtime.protocol.messages import Ledger as LedgerAnswer
from tests.protocol import rigs

KEY = (0, 7)
BUCKETS = ((0, 1), (0,))


class Rig(rigs.Rig):
    """A trainer with two shards, of two buckets and one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(AsyncTrainer(TrainerOptions("t", BUCKETS, run="j", **{"retry_interval": 1.0} | options)))

    def get(self, shard: int, message: Any, payload: Any = None) -> list[Any]:
        return self.feed(FromShard(shard, message, payload))

    def meet(self, shard: int, *, generation: int = 0, version: int = 0, incarnation: str = "i") -> list[Any]:
        self.feed(ShardUp(shard, incarnation))
        return self.get(shard, Welcome(shard, incarnation, generation, version))

    def buckets(self, shard: int, version: int, generation: int = 0) -> None:
        for b in BUCKETS[shard]:
            self.get(shard, Parameters(generation, version, b), f"{shard}.{b}@{version}")

    def ready(self) -> Rig:
        """Both shards are met, their buckets loaded, and chunk 7 of three batches is taken: nobody has any of it."""
        for shard in (0, 1):
            self.meet(shard)
            self.buckets(shard, 0)
            for b in BUCKETS[shard]:
                self.feed(Loaded(shard, b))
        self.feed(Took(KEY, 3))
        for shard in (0, 1):
            self.ledger(shard)
        return self

    def ledger(self, shard: int, *ranges: tuple[int, int]) -> list[Any]:
        return self.get(shard, LedgerAnswer(*KEY, list(ranges)))

    def ack(self, shard: int, batch: int, version: int, fresh: bool = True) -> list[Any]:
        return self.get(shard, BatchAck(*KEY, batch, version, fresh))

    def compute(self, batch: int, timeout: float = 5.0, limit: int = -1) -> list[Any]:
        """One batch, up to its barrier; returns what was sent."""
        sent = self.feed(BeginBatch(KEY, batch))
        for shard in (0, 1):
            for b in BUCKETS[shard] if self.machine.lacks(shard) else ():
                sent += self.feed(Pushed(shard, b, 4, f"g{batch}"))
        return sent + self.feed(CloseBatch(timeout, limit))


def sent(effects: list[Any], kind: type) -> list[tuple[int, Any]]:
    return [(e.shard, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def counts(effects: list[Any]) -> list[str]:
    return [e.name for e in effects if isinstance(e, Count)]


def test_it_meets_a_shard_and_asks_for_its_buckets() -> None:
    rig = Rig()
    assert sent(rig.feed(ShardUp(0, "i")), Hello) == [(0, Hello("j", "t"))]
    effects = rig.get(0, Welcome(0, "i", 3, 12))
    assert sent(effects, Pull) == [(0, Pull(3, -1, 0)), (0, Pull(3, -1, 1))]
    assert not rig.machine.has(0, 0)
    rig.get(0, Parameters(3, 11, 0), "old")
    assert not rig.machine.has(0, 0), "older than the welcome said"
    rig.get(0, Parameters(3, 12, 0), "new")
    assert (rig.machine.has(0, 0), rig.machine.frame(0, 0)) == (True, "new")
    rig.feed(Loaded(0, 0))
    assert rig.machine.frame(0, 0) is None


def test_a_batch_is_pushed_to_every_shard_and_settled_by_their_answers() -> None:
    rig = Rig().ready()
    pushes = sent(rig.compute(0), BatchPush)
    assert pushes == [(s, BatchPush(0, *KEY, 0, 3, b, 4, 0)) for s, b in ((0, 0), (0, 1), (1, 0))]
    assert rig.machine.settled() < len(rig.machine.connections)
    rig.ack(0, 0, 1)
    assert rig.machine.settled() < len(rig.machine.connections)
    rig.ack(1, 0, 1)
    assert rig.machine.settled() == len(rig.machine.connections)
    assert not rig.machine.has(0, 0), "the new bucket is on its way"
    rig.buckets(0, 1)
    assert rig.machine.frame(0, 0) == "0.0@1"
    assert rig.machine.progress(KEY) == 1
    assert not rig.machine.whole(KEY)
    assert rig.machine.next_batch(KEY, 0) == 1


def test_a_chunk_that_is_taken_over_goes_on_where_the_ledgers_say() -> None:
    rig = Rig()
    for shard in (0, 1):
        rig.meet(shard)
        rig.buckets(shard, 0)
    assert sent(rig.feed(Took(KEY, 3)), LedgerQuery) == [(0, LedgerQuery(*KEY)), (1, LedgerQuery(*KEY))]
    rig.ledger(0, (0, 2))
    assert not rig.machine.known(KEY)
    rig.ledger(1, (0, 1), (2, 3))
    assert rig.machine.known(KEY)
    assert rig.machine.progress(KEY) == 1
    assert rig.machine.next_batch(KEY, -1) == 1
    assert {s for s, _ in sent(rig.compute(1), BatchPush)} == {1}, "shard 0 has it"
    rig.ack(1, 1, 5)
    assert rig.machine.settled() == len(rig.machine.connections)
    assert rig.machine.next_batch(KEY, 1) == 2
    assert {s for s, _ in sent(rig.compute(2), BatchPush)} == {0}
    rig.ledger(0, (0, ALL))
    assert rig.machine.whole(KEY)


def test_a_shard_that_does_not_answer_is_skipped_and_made_good() -> None:
    rig = Rig().ready()
    rig.compute(0, timeout=5.0)
    rig.ack(0, 0, 1)
    rig.now = 4.9
    assert counts(rig.feed(Tick())) == []
    rig.now = 5.0
    assert counts(rig.feed(Tick())) == ["skipped"]
    assert rig.machine.settled() == len(rig.machine.connections)
    assert not rig.machine.whole(KEY)
    for batch in (1, 2):
        rig.compute(batch)
        rig.ack(0, batch, batch + 1)
        rig.ack(1, batch, batch)
        assert rig.machine.settled() == len(rig.machine.connections)
    assert rig.machine.next_batch(KEY, 2) == 0, "before the chunk is completed"
    assert {s for s, _ in sent(rig.compute(0), BatchPush)} == {1}
    rig.ack(1, 0, 3)
    assert rig.machine.whole(KEY)


def test_an_answer_that_comes_late_makes_it_good_as_well() -> None:
    rig = Rig().ready()
    rig.compute(0)
    rig.ack(0, 0, 1)
    rig.now = 6.0
    rig.feed(Tick())
    rig.compute(1)
    rig.ack(1, 0, 1)
    assert rig.machine.next_batch(KEY, 1) == 2
    assert rig.machine.connections[1].skipped == set()


def test_beyond_max_skipped_the_trainer_waits() -> None:
    rig = Rig().ready()
    for batch in (0, 1):
        rig.compute(batch, limit=1)
        rig.ack(0, batch, batch + 1)
        rig.now += 6.0
        effects = [*rig.feed(Tick()), *rig.feed(Tick())]
        assert counts(effects) == [["skipped"], ["waited"]][batch], "said once"
        assert (rig.machine.settled() == len(rig.machine.connections)) == (batch == 0)
    rig.ack(1, 1, 1)
    assert rig.machine.settled() == len(rig.machine.connections)


def test_a_broken_connection_gets_the_batch_again() -> None:
    rig = Rig().ready()
    rig.compute(0)
    rig.feed(ShardDown(0))
    assert rig.machine.next_batch(KEY, 2) == 0, "shard 1 lacks it as well"
    effects = rig.meet(0, version=0)
    assert sent(effects, BatchPush) == [(0, BatchPush(0, *KEY, 0, 3, b, 4, 0)) for b in (0, 1)]
    assert sent(effects, LedgerQuery) == [], "of the same generation nothing is forgotten"


def test_a_shard_in_a_new_generation_is_asked_what_it_has() -> None:
    rig = Rig().ready()
    for batch in (0, 1, 2):
        rig.compute(batch)
        rig.ack(0, batch, 50 + batch)
        rig.buckets(0, 50 + batch)
        rig.ack(1, batch, batch + 1)
    assert rig.machine.whole(KEY)
    effects = rig.meet(0, generation=1, version=40, incarnation="again")
    assert sent(effects, LedgerQuery) == [(0, LedgerQuery(*KEY))]
    assert rig.machine.generations() == [1, 0]
    assert not rig.machine.whole(KEY)
    rig.ledger(0, (0, 2))
    assert rig.machine.next_batch(KEY, 2) == 2
    pushes = sent(rig.compute(2), BatchPush)
    assert pushes[0] == (0, BatchPush(1, *KEY, 2, 3, 0, 4, -1)), "from the parameters of another history"
    rig.get(0, Parameters(0, 52, 0), "of the old generation")
    assert not rig.machine.has(0, 0)
    rig.buckets(0, 40, generation=1)
    assert rig.machine.frame(0, 0) == "0.0@40"


def test_what_a_shard_was_skipped_for_counts_no_more_when_it_comes_back() -> None:
    rig = Rig().ready()
    rig.compute(0, limit=1)
    rig.now = 6.0
    assert counts(rig.feed(Tick())) == ["skipped", "skipped"]
    rig.meet(1, generation=1, incarnation="again")
    rig.compute(1, limit=1)
    rig.ack(0, 1, 1)
    rig.now = 12.0
    assert counts(rig.feed(Tick())) == ["skipped"]


def test_a_stale_batch_is_computed_again_from_newer_parameters() -> None:
    rig = Rig().ready()
    rig.compute(0)
    rig.ack(1, 0, 1)
    effects = rig.get(0, Refused("stale", "9 behind", 0, 9))
    assert counts(effects) == ["refused-stale"]
    assert rig.machine.settled() == len(rig.machine.connections)
    assert {m.bucket for _, m in sent(effects, Pull)} == {0, 1}
    rig.buckets(0, 9)
    for b in BUCKETS[0]:
        rig.feed(Loaded(0, b))
    assert rig.machine.next_batch(KEY, 2) == 0
    assert [m.version for _, m in sent(rig.compute(0), BatchPush)] == [9, 9]


@pytest.mark.parametrize("code", ["unknown-peer", "stale-generation", "not-ready"])
def test_a_refusal_leads_to_one_new_hello(code: str) -> None:
    rig = Rig().ready()
    rig.compute(0)
    effects = [e for _ in range(2) for e in rig.get(0, Refused(code, "", 1, 0))]
    assert len(sent(effects, Hello)) == 1
    assert sent(rig.get(0, Welcome(0, "i", 1, 0)), BatchPush)[0][1].generation == 1


def test_questions_without_an_answer_are_asked_again() -> None:
    rig = Rig(retry_interval=1.0)
    rig.feed(ShardUp(0, "i"))
    assert sent(rig.feed(Tick()), Hello) == []
    rig.now = 1.0
    assert len(sent(rig.feed(Tick()), Hello)) == 1
    rig.get(0, Welcome(0, "i", 0, 0))
    rig.feed(Took(KEY, 3))
    rig.get(0, Parameters(0, 0, 0), "b")
    rig.now = 2.5
    effects = rig.feed(Tick())
    assert (sent(effects, Pull), sent(effects, LedgerQuery)) == ([(0, Pull(0, -1, 1))], [(0, LedgerQuery(*KEY))])
    rig.feed(ShardDown(0))
    rig.now = 9.0
    assert rig.feed(Tick()) == [], "nobody to ask"


def test_late_messages_change_nothing() -> None:
    rig = Rig().ready()
    assert counts(rig.get(0, Welcome(0, "another", 5, 9))) == ["late"]
    rig.feed(ShardUp(0, "next"))
    assert counts(rig.ack(0, 0, 1)) == ["late"]
    assert rig.machine.next_batch(KEY, -1) == 0
    rig.feed(Dropped(KEY))
    assert rig.get(1, LedgerAnswer(*KEY, [(0, 3)])) == []
    with pytest.raises(IllegalTransition, match="was not taken"):
        rig.feed(BeginBatch(KEY, 0))
