"""Event stories of two shards that exchange partial sums, to clip by the global norm."""

from __future__ import annotations

from typing import Any

from graphft.runtime.protocol.events import (
    ApplyRound,
    ComputePartials,
    PartialsReady,
    Received,
    Rollback,
    SendShard,
    Tick,
)
from graphft.runtime.protocol.messages import Hello, Partials, PartialsQuery
from graphft.runtime.protocol.round import PartialSums
from tests.protocol.rigs import ShardRig, codes, counted, of


class Pair:
    """Shard 0 of two that exchange partial sums."""

    def __init__(self) -> None:
        self.rig = ShardRig(shards=2, reduce=True)
        self.rig.feed(Received("shard-1", Hello("j", "shard-1")))

    def close(self) -> list[Any]:
        step = self.rig.machine.version
        return [*self.rig.contribute("a", step, 0), *self.rig.contribute("a", step, 1)]

    def other(self, step: int, generation: int = 0, shard: int = 1) -> list[Any]:
        return self.rig.feed(Received("shard-1", Partials(generation, step, shard), f"sum of {shard} at {step}"))


def test_with_a_norm_a_round_closes_in_two_phases() -> None:
    pair = Pair()
    (compute,) = of(ComputePartials, pair.close())
    assert [c.slot for c in compute.contributions] == [0, 1]
    effects = pair.rig.feed(PartialsReady(0, "own"))
    assert [(e.shard, type(e.message).__name__, e.payload) for e in of(SendShard, effects)] == [
        (1, "Hello", None),
        (1, "Partials", "own"),
    ]
    (apply,) = of(ApplyRound, pair.other(0))
    assert apply.partials == ("own", "sum of 1 at 0")
    assert apply.contributions == compute.contributions


def test_partial_sums_may_come_early_twice_late_or_of_another_generation() -> None:
    pair = Pair()
    assert pair.other(0) == []
    assert counted(pair.other(0)) == ["duplicate-partials"]
    assert counted(pair.other(0, generation=1)) == ["other-partials"]
    assert counted(pair.other(1)) == ["other-partials"]
    assert codes(pair.other(0, shard=0)) == ["malformed"]
    pair.close()
    assert of(ApplyRound, pair.rig.feed(PartialsReady(0, "own")))
    assert counted(pair.other(0)) == ["other-partials"]


def test_partial_sums_of_before_a_rollback_or_of_another_step_do_not_count() -> None:
    pair = Pair()
    pair.other(0)
    pair.close()
    pair.rig.feed(PartialsReady(0, "own"), Rollback(1, 0))
    pair.close()
    assert not of(ApplyRound, pair.rig.feed(PartialsReady(0, "own again")))
    (apply,) = of(ApplyRound, pair.other(0, generation=1))
    assert apply.partials == ("own again", "sum of 1 at 0")
    pair.close()
    assert not of(ApplyRound, pair.rig.feed(PartialsReady(1, "own")))


def test_missing_partial_sums_are_asked_for_again() -> None:
    pair = Pair()
    pair.close()
    pair.rig.feed(PartialsReady(0, "own"))
    assert pair.rig.pass_time(0.5, Tick()) == []
    assert [e.message for e in pair.rig.pass_time(0.5, Tick())] == [Hello("j", "shard-0"), PartialsQuery(0, 0, 0)]
    assert pair.rig.pass_time(0.5, Tick()) == []


def test_partial_sums_are_remembered_for_the_step_before() -> None:
    pair = Pair()

    def ask(step: int) -> list[Any]:
        return pair.rig.feed(Received("shard-1", PartialsQuery(0, step, 1)))

    assert counted(ask(0)) == ["partials-not-ready"]
    for step in range(2):
        pair.close()
        pair.rig.feed(PartialsReady(step, f"own {step}"))
        pair.other(step)
        assert [e.payload for e in ask(step)] == [None, f"own {step}"]
    assert [e.payload for e in ask(1)] == [None, "own 1"]
    assert counted(ask(0)) == ["partials-not-ready"]


def test_a_shard_without_data_says_so_to_one_that_asks() -> None:
    pair = Pair()
    pair.rig.empty("a", 0, 0)
    pair.rig.empty("a", 0, 1)
    effects = pair.rig.feed(Received("shard-1", PartialsQuery(0, 0, 1)))
    assert [(type(e.message).__name__, e.payload) for e in effects] == [("Hello", None), ("Partials", None)]


def test_partial_sums_are_in_the_order_of_the_shards() -> None:
    sums = PartialSums(1, 3)
    sums.offer(0, "b")
    assert (sums.keep(2, "c"), sums.keep(0, "a"), sums.keep(0, "other")) == (True, True, False)
    assert sums.ordered(0) == ("a", "b", "c")
