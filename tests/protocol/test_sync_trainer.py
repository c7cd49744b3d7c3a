"""Event stories of a sync trainer, each named after the rule it tells."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.errors import GraphftError
from graphft.runtime.protocol.events import (
    Begin,
    Closed,
    Copied,
    FromShard,
    Pushed,
    Rollback,
    Send,
    ShardDown,
    ShardUp,
    SlotGained,
    SlotLost,
    Tick,
    TrainerOptions,
    Work,
)
from graphft.runtime.protocol.machine import IllegalTransition
from graphft.runtime.protocol.messages import Empty, Hello, Parameters, Pull, Push, Query
from graphft.runtime.protocol.sync_trainer import SyncTrainer
from tests.protocol.rigs import TrainerRig, counted, of


def sent(effects: list[Any]) -> list[tuple[int, Any]]:
    return [(e.shard, e.message) for e in of(Send, effects)]


def contribute(rig: TrainerRig, keep: bool = False) -> list[Any]:
    """Computes the current work, whose buckets are there. `keep`: it changes shard 0's in place."""
    return rig.feed(
        Copied(0, 0, rig.machine.current.step, keep),
        Copied(1, 0, rig.machine.current.step),
        Pushed(1, 0, 4, "g1"),
        Pushed(0, 0, 4, "g0"),
        Closed(2),
    )


def arrive(rig: TrainerRig, version: int) -> None:
    rig.bucket(0, version)
    rig.bucket(1, version)


# -- what to work on ----------------------------------------------------------------------------------------------


def test_a_trainer_introduces_itself_and_waits_for_every_shard() -> None:
    rig = TrainerRig()
    assert sent(rig.effects) == [(0, Hello("j", "t")), (1, Hello("j", "t"))]
    machine = SyncTrainer(TrainerOptions("t", ((0,), (0,)), 10), generation=0)
    machine.step(ShardUp(0, "A"), 0.0)
    machine.step(SlotGained(0), 0.0)
    assert machine.next_work() is None


def test_a_gained_slot_starts_at_the_lowest_version_among_the_shards() -> None:
    rig = TrainerRig(slots=(), version=7)
    assert sent(rig.feed(SlotGained(2))) == [(0, Query()), (1, Query())]
    assert rig.machine.next_work() is None
    rig.welcome(0, "A", 8)
    assert rig.machine.next_work() is None
    rig.welcome(1, "B", 7)
    assert rig.machine.next_work() == Work(7, 2)


def test_the_lowest_step_comes_first_then_the_lowest_slot() -> None:
    rig = TrainerRig((1, 3))
    rig.feed(Begin())
    assert rig.machine.current == Work(0, 1)
    arrive(rig, 0)
    contribute(rig)
    assert rig.machine.next_work() == Work(0, 3)
    rig.gain(0, 0)
    assert rig.machine.next_work() == Work(0, 0)


def test_steps_that_others_contributed_meanwhile_are_skipped() -> None:
    rig = TrainerRig((0,))
    rig.feed(Begin())
    rig.welcome(0, "A", 2)
    assert rig.machine.next_work() is None  # two versions apart: something is lost
    rig.welcome(1, "B", 2)
    assert rig.machine.work_changed
    assert rig.machine.next_work() == Work(2, 0)


def test_a_lost_slot_is_work_changed() -> None:
    rig = TrainerRig((0,))
    rig.feed(Begin())
    rig.feed(SlotLost(0))
    assert rig.machine.work_changed
    rig.feed(Begin())
    assert rig.machine.current is None


def test_a_slot_that_is_claimed_again_begins_anew() -> None:
    rig = TrainerRig(())
    rig.feed(SlotGained(0, claim=7))
    rig.welcome(0, "A", 4)
    rig.welcome(1, "B", 4)
    assert rig.machine.next_work() == Work(4, 0)
    assert sent(rig.feed(SlotGained(0, claim=9))) == [(0, Query()), (1, Query())], "where the shards are is asked again"
    assert rig.machine.next_work() is None
    rig.feed(SlotLost(0, claim=7))
    assert rig.machine.slots.keys() == {0}, "the older claim's loss is no news"
    assert rig.feed(SlotGained(0, claim=9)) == []
    rig.feed(SlotLost(0, claim=9))
    assert not rig.machine.slots


# -- buckets ------------------------------------------------------------------------------------------------------


def test_begin_asks_for_what_is_missing_and_only_once() -> None:
    rig = TrainerRig((0, 1))
    assert sent(rig.feed(Begin())) == [(0, Pull(0, 0, 0)), (1, Pull(0, 0, 0))]
    rig.bucket(0, 0)
    assert sent(rig.feed(Begin())) == []
    assert (rig.machine.has(0, 0), rig.machine.has(1, 0)) == (True, False)
    assert rig.machine.frame(0, 0) == "0@0"


def test_a_bucket_that_the_step_changes_in_place_is_kept_for_the_next_slot() -> None:
    rig = TrainerRig((0, 1))
    rig.feed(Begin())
    arrive(rig, 0)
    contribute(rig, keep=True)
    rig.feed(Begin())
    assert (rig.machine.frame(0, 0), rig.machine.frame(1, 0)) == ("0@0", None)


def test_only_the_last_slot_of_a_step_asks_for_the_new_buckets() -> None:
    rig = TrainerRig((0, 1))
    rig.feed(Begin())
    arrive(rig, 0)
    assert [m.want for _, m in sent(contribute(rig))] == [False, False]
    rig.feed(Begin())
    assert [m.want for _, m in sent(contribute(rig))] == [True, True]
    assert sent(rig.feed(Begin())) == []  # the answers are on their way
    assert rig.machine.current == Work(1, 0)
    arrive(rig, 1)
    assert rig.machine.frame(1, 0) == "1@1"


def test_a_version_that_is_one_behind_is_pulled_from_every_shard() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(Begin())
    arrive(rig, 4)
    contribute(rig)
    rig.feed(Begin())
    rig.bucket(0, 5)
    assert sum(rig.machine.has(s, 0) for s in (0, 1)) == 1
    rig.gain(1, 5, 4)
    assert rig.machine.work_changed
    assert sent(rig.feed(Begin())) == []  # both are in the tensors still
    assert rig.machine.current == Work(4, 1)
    contribute(rig)
    rig.feed(Begin(), Copied(0, 0, 5))
    rig.gain(2, 5, 4)
    assert sent(rig.feed(Begin())) == [(0, Pull(0, 4, 0))]


def test_a_refused_old_version_tells_where_the_shard_is() -> None:
    rig = TrainerRig((0,))
    rig.feed(Begin())
    assert counted(rig.refused(0, "gone", 2)) == ["refused-gone"]
    rig.refused(1, "gone", 2)
    assert rig.machine.next_work() == Work(2, 0)
    assert sent(rig.feed(Begin())) == [(0, Pull(0, 2, 0)), (1, Pull(0, 2, 0))]


def test_unanswered_pulls_are_repeated_after_a_while() -> None:
    rig = TrainerRig((0,))
    rig.feed(Begin())
    rig.bucket(0, 0)
    assert sent(rig.pass_time(4.9, Tick())) == []
    assert sent(rig.pass_time(0.1, Tick())) == [(1, Pull(0, 0, 0))]


# -- contributing -------------------------------------------------------------------------------------------------


def test_pushes_carry_their_names() -> None:
    rig = TrainerRig((3,), version=2, generation=5)
    rig.feed(Begin())
    arrive(rig, 2)
    effects = contribute(rig)
    assert sent(effects) == [(1, Push(5, 2, 3, 0, 4, True)), (0, Push(5, 2, 3, 0, 4, True))]
    assert [e.payload for e in of(Send, effects)] == ["g1", "g0"]
    assert rig.machine.next_work() == Work(3, 3)


def test_an_empty_contribution_waits_until_every_shard_has_reached_its_step() -> None:
    rig = TrainerRig((0,))
    rig.feed(Begin())
    assert rig.machine.reached() == 2
    assert sent(rig.feed(Closed(2))) == [(0, Empty(0, 0, 0, True)), (1, Empty(0, 0, 0, True))]
    rig.feed(Begin())
    rig.bucket(0, 1)
    assert rig.machine.reached() == 1
    rig.bucket(1, 1)
    assert rig.machine.reached() == 2


def test_half_a_contribution_cannot_be_closed() -> None:
    rig = TrainerRig((0,))
    rig.feed(Begin())
    arrive(rig, 0)
    rig.feed(Pushed(0, 0, 4, "g"))
    with pytest.raises(IllegalTransition, match="were not pushed"):
        rig.feed(Closed(2))
    with pytest.raises(IllegalTransition, match="pushed twice"):
        rig.feed(Pushed(0, 0, 4, "g"))


# -- shards that go and come --------------------------------------------------------------------------------------


def test_what_a_shard_may_have_lost_is_contributed_again() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(Begin())
    arrive(rig, 4)
    contribute(rig)
    rig.feed(Begin(), ShardDown(1), ShardUp(1, "B2"))
    rig.welcome(1, "B2", 4)
    assert rig.machine.next_work() == Work(4, 0)
    rig.feed(Begin())
    assert [s for s, _ in sent(contribute(rig))] == [1, 0]
    assert rig.machine.next_work() == Work(5, 0)


def test_a_contribution_in_the_middle_of_which_a_shard_restarts_is_done_again() -> None:
    rig = TrainerRig((0,), version=4, buckets=((0,), (0, 1)))
    rig.feed(Begin())
    arrive(rig, 4)
    rig.bucket(1, 4, 1)
    rig.feed(
        *[Copied(s, b, 4) for s, b in ((0, 0), (1, 0), (1, 1))], Pushed(1, 0, 4, "g1"), ShardDown(1), ShardUp(1, "B2")
    )
    rig.welcome(1, "B2", 4)
    effects = rig.feed(Pushed(1, 1, 4, "g2"), Pushed(0, 0, 4, "g0"), Closed(2))
    assert [s for s, _ in sent(effects)] == [1, 0]
    assert rig.machine.next_work() == Work(4, 0)


def test_nothing_is_pushed_to_a_shard_that_came_back_older() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(Begin())
    arrive(rig, 4)
    rig.feed(ShardDown(1), ShardUp(1, "B2"))
    rig.welcome(1, "B2", 3)
    effects = rig.feed(Pushed(1, 0, 4, "g1"), Pushed(0, 0, 4, "g0"), Closed(2))
    assert [s for s, _ in sent(effects)] == [0]
    assert rig.machine.next_work() == Work(3, 0)


def test_a_shard_that_came_back_older_is_asked_though_all_buckets_are_here() -> None:
    rig = TrainerRig((0,), version=4)
    arrive(rig, 5)  # somebody closed step 4
    rig.feed(ShardDown(1), ShardUp(1, "B2"))
    rig.welcome(1, "B2", 4)
    rig.feed(Begin())
    arrive(rig, 4)
    contribute(rig)
    rig.pass_time(5.0, Begin())
    assert not rig.machine.has(1, 0)
    assert (1, Pull(0, 5, 0)) in sent(rig.feed(Tick()))


def test_a_shard_two_versions_behind_is_told_so() -> None:
    rig = TrainerRig((0,), version=6)
    rig.feed(ShardDown(1), ShardUp(1, "B2"))
    assert (1, Pull(0, 6, 0)) in sent(rig.welcome(1, "B2", 3))
    assert rig.machine.next_work() is None


def test_late_welcomes_of_replaced_incarnations_do_not_count() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(ShardUp(1, "B2"))
    assert counted(rig.welcome(1, "B", 4)) == ["other-welcome"]
    assert rig.machine.next_work() is None
    assert counted(rig.bucket(1, 9)) == ["other-bucket"]


def test_a_shard_that_forgot_this_trainer_is_greeted_again_once() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(Begin())
    assert sent(rig.refused(1, "unknown-peer", 4)) == [(1, Hello("j", "t"))]
    assert sent(rig.refused(1, "unknown-peer", 4)) == []
    assert sent(rig.pass_time(0.5, Tick())) == [(1, Hello("j", "t"))]


# -- generations --------------------------------------------------------------------------------------------------


def test_a_refusal_as_stale_waits_for_the_watch() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(Begin())
    arrive(rig, 4)
    assert "behind" in counted(rig.refused(0, "stale-generation", 2, generation=1))
    assert rig.machine.next_work() is None
    assert counted(rig.feed(Pushed(0, 0, 4, "g"), Pushed(1, 0, 4, "g"), Closed(2))) == ["void-push"] * 2
    effects = rig.feed(Rollback(1, 2))
    assert sent(effects) == [(0, Hello("j", "t")), (1, Hello("j", "t"))]
    rig.welcome(0, "A", 2)
    rig.welcome(1, "B", 2)
    assert rig.machine.next_work() == Work(2, 0)


def test_a_rollback_voids_work_frames_and_what_is_in_flight() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(Begin())
    arrive(rig, 4)
    rig.feed(Copied(0, 0, 4), Rollback(1, 4))
    assert counted(rig.feed(Pushed(0, 0, 4, "g"), Closed(2))) == ["void-push"] * 2
    rig.feed(Copied(1, 0, 4))
    assert counted(rig.feed(FromShard(0, Parameters(0, 4, 0), "old"))) == ["other-bucket"]
    rig.welcome(0, "A", 4)
    rig.welcome(1, "B", 4)
    assert counted(rig.feed(FromShard(0, Parameters(0, 4, 0), "old"))) == ["other-bucket"]
    assert sent(rig.feed(Begin())) == [(0, Pull(1, 4, 0)), (1, Pull(1, 4, 0))]
    assert not rig.machine.has(1, 0)


def test_a_shard_that_has_not_rolled_back_yet_is_waited_for() -> None:
    rig = TrainerRig((0,), version=4)
    rig.feed(Rollback(1, 2))
    rig.welcome(0, "A", 2)
    assert counted(rig.welcome(1, "B", 4, generation=0)) == ["early-shard"]
    assert rig.machine.next_work() is None
    rig.welcome(1, "B", 2)  # unasked, when it has
    assert rig.machine.next_work() == Work(2, 0)


def test_a_shard_without_a_bucket_is_refused() -> None:
    with pytest.raises(GraphftError, match="shard 1 holds no bucket"):
        SyncTrainer(TrainerOptions("t", ((0,), ()), 10), generation=0)
