"""A contribution that is not finite: the last bucket for each shard waits until that is known, and every shard decides
the same by it."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.protocol.events import (
    ApplyBatch,
    ApplyRound,
    Begin,
    BeginBatch,
    CloseBatch,
    Closed,
    ComputePartials,
    Copied,
    Pushed,
    Received,
    RoundSkipped,
    ShardDown,
)
from graphft.runtime.protocol.messages import BatchAck, BatchPush, Parameters, Push, Refused
from tests.protocol import test_async_trainer
from tests.protocol.rigs import ShardRig, TrainerRig, codes, of
from tests.protocol.test_async_shard import AsyncRig, acks
from tests.protocol.test_async_trainer import KEY

# -- sync -------------------------------------------------------------------------------------------------------------


def pushes(effects: list[Any]) -> list[tuple[int, int, bool]]:
    """(shard, bucket, finite) of what was sent."""
    return [(e.shard, e.message.bucket, e.message.finite) for e in of(Push, effects) + of(BatchPush, effects)]


def begun(**options: Any) -> TrainerRig:
    """Shard 0 has two buckets, shard 1 has one; all are loaded."""
    rig = TrainerRig(buckets=((0, 1), (0,)), **options)
    for shard, bucket in ((0, 0), (0, 1), (1, 0)):
        rig.bucket(shard, 0, bucket)
    rig.feed(Begin())
    rig.feed(*[Copied(shard, bucket, 0) for shard, bucket in ((0, 0), (0, 1), (1, 0))])
    return rig


@pytest.mark.parametrize("finite", [True, False])
def test_the_last_bucket_for_each_shard_tells_whether_the_contribution_is_finite(finite: bool) -> None:
    rig = begun()
    assert pushes(rig.feed(Pushed(0, 1, 4, "g"))) == [(0, 1, True)]
    assert pushes(rig.feed(Pushed(1, 0, 4, "g"), Pushed(0, 0, 4, "g"))) == []
    assert sorted(pushes(rig.feed(Closed(2, finite)))) == [(0, 0, finite), (1, 0, finite)]
    assert rig.machine.slots[0].next == 1


def test_what_waits_for_a_shard_that_is_gone_meanwhile_is_done_again() -> None:
    rig = begun()
    rig.feed(*[Pushed(s, b, 4, "g") for s, b in ((0, 1), (1, 0), (0, 0))], ShardDown(1))
    assert pushes(rig.feed(Closed(2, False))) == [(0, 0, False)]
    assert rig.machine.slots[0].next == 0


def push(rig: ShardRig, slot: int, finite: bool, peer: str = "a") -> list[Any]:
    step, first = rig.machine.version, Push(0, rig.machine.version, slot, 0, 4, False)
    return rig.feed(Received(peer, first, "x"), Received(peer, Push(0, step, slot, 1, 4, False, finite), "y"))


@pytest.mark.parametrize("reduce", [False, True])
def test_one_slot_that_is_not_finite_makes_a_shard_leave_the_step_out(reduce: bool) -> None:
    rig = ShardRig(skips=True, reduce=reduce, shards=2 if reduce else 1)
    assert push(rig, 1, False) == []
    effects = push(rig, 0, True)
    (skipped,) = of(RoundSkipped, effects)
    assert (skipped.step, skipped.nonfinite) == (0, (1,))
    assert not of(ApplyRound, effects) + of(ComputePartials, effects)
    assert rig.machine.version == 1
    (before,) = of(Parameters, rig.pull("b", 0))
    assert (before.message.version, before.source) == (0, "previous"), "the skip block may have changed the loss scale"
    push(rig, 0, True)
    assert of(ComputePartials if reduce else ApplyRound, push(rig, 1, True)), "the next step is an ordinary one"


def test_the_bucket_that_tells_it_may_come_first() -> None:
    rig = ShardRig(skips=True)
    for bucket, finite in ((1, False), (0, True)):
        rig.feed(Received("a", Push(0, 0, 0, bucket, 4, False, finite), "y"))
    (skipped,) = of(RoundSkipped, push(rig, 1, True))
    assert skipped.nonfinite == (0,)


def test_a_shard_that_leaves_nothing_out_refuses_it() -> None:
    rig = ShardRig()
    assert codes(rig.feed(Received("a", Push(0, 0, 0, 0, 4, False, False), "x"))) == ["malformed"]
    assert codes(AsyncRig().feed(Received("a", BatchPush(0, 0, 0, 0, 4, 0, 2, 0, False), "x"))) == ["malformed"]


# -- async ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finite", [True, False])
def test_the_last_bucket_of_a_batch_tells_every_shard(finite: bool) -> None:
    rig = test_async_trainer.Rig().ready()
    rig.feed(BeginBatch(KEY, 0))
    assert pushes(rig.feed(Pushed(0, 0, 4, "g"))) == [(0, 0, True)]
    assert pushes(rig.feed(Pushed(0, 1, 4, "g"), Pushed(1, 0, 4, "g"))) == []
    effects = rig.feed(CloseBatch(5.0, -1, finite, (0.5,)))
    assert pushes(effects) == [(0, 1, finite), (1, 0, finite)]
    assert [e.message.values for e in of(BatchPush, effects)] == [(0.5,), ()]
    assert rig.machine.settled() == 0


def test_a_shard_that_is_met_again_gets_the_last_bucket_only_when_it_is_known() -> None:
    rig = test_async_trainer.Rig().ready()
    rig.feed(BeginBatch(KEY, 0), *[Pushed(0, b, 4, "g") for b in (0, 1)], ShardDown(0))
    assert pushes(rig.meet(0)) == [(0, 0, True)]
    rig.feed(ShardDown(0), Pushed(1, 0, 4, "g"))
    assert pushes(rig.feed(CloseBatch(5.0, -1, False))) == [(1, 0, False)]
    assert [bucket for _, bucket, _ in pushes(rig.meet(0))] == [0, 1]
    assert not all(finite for *_, finite in pushes(rig.meet(0)))


def test_a_batch_that_is_not_finite_counts_as_applied_once() -> None:
    rig = AsyncRig(skips=True)
    for peer in "ab":
        effects = rig.feed(
            Received(peer, BatchPush(0, 0, 0, 2, 4, 0, 2, 0), "x"),
            Received(peer, BatchPush(0, 0, 0, 2, 4, 1, 2, 0, False), "y"),
        )
        if peer == "a":
            (applied,) = of(ApplyBatch, effects)
            assert not applied.finite
        assert acks(effects)[0] == (peer, 2, peer == "a")
        assert of(BatchAck, effects)
        assert not of(Refused, effects)
    assert not of(ApplyBatch, effects)
    assert rig.machine.version == 1
    assert rig.machine.ledger.has(0, 0, 2)
