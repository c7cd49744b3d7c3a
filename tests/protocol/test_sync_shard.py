"""Event stories of a sync shard, each named after the rule it tells."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.protocol.events import (
    ApplyRound,
    CheckpointAt,
    Finished,
    PartialsReady,
    PeerLeft,
    Received,
    Reply,
    RequestRollback,
    Rollback,
    RoundSkipped,
    Started,
    StepsWanted,
    SyncOptions,
    TakeCheckpoint,
    Tick,
)
from graphft.runtime.protocol.machine import IllegalTransition
from graphft.runtime.protocol.messages import Hello, Parameters, Pull, Push, Query, Refused, Welcome
from graphft.runtime.protocol.sync_shard import SyncShard
from tests.protocol.rigs import ShardRig, codes, counted, of


def buckets(effects: list[Any]) -> list[tuple[str, int, int, str]]:
    """(peer, bucket, version, source) of every bucket that is sent."""
    return [(e.peer, e.message.bucket, e.message.version, e.source) for e in of(Parameters, effects)]


# -- closing a round ----------------------------------------------------------------------------------------------


def test_contributions_come_in_slot_order_not_in_order_of_arrival() -> None:
    rig = ShardRig(slots=3)
    for slot in (2, 0, 1):
        effects = rig.contribute("a", 0, slot)
    (apply,) = of(ApplyRound, effects)
    assert [(c.slot, c.samples, dict(c.payloads)) for c in apply.contributions] == [
        (s, 4, {0: f"0.{s}.0", 1: f"0.{s}.1"}) for s in range(3)
    ]


def test_a_second_copy_is_ignored_and_its_want_is_remembered() -> None:
    rig = ShardRig()
    rig.push("a", 0, 0, 0)
    assert counted(rig.push("b", 0, 0, 0, want=True, payload="other bits")) == ["duplicate-push"]
    rig.push("a", 0, 0, 1)
    assert counted(rig.empty("b", 0, 0)) == ["duplicate-push"]
    effects = rig.contribute("a", 0, 1)
    (apply,) = of(ApplyRound, effects)
    assert [c.slot for c in apply.contributions] == [0, 1]
    assert apply.contributions[0].payloads[0] == "0.0.0"
    assert buckets(effects) == [("b", 0, 1, "current")]
    assert effects.index(apply) == 0, "answers follow what is applied"


def test_everyone_gets_exactly_the_buckets_it_wanted_once() -> None:
    rig = ShardRig()
    rig.push("a", 0, 0, 0, want=True)
    rig.push("a", 0, 0, 1)
    rig.pull("a", 1, 0)  # asks again for what it wants already
    rig.push("b", 0, 1, 1, want=True)
    assert buckets(rig.push("b", 0, 1, 0)) == [("a", 0, 1, "current"), ("b", 1, 1, "current")]
    assert buckets(rig.run_round()) == []


def test_an_empty_contribution_counts_whole_and_has_no_weight() -> None:
    rig = ShardRig()
    rig.empty("b", 0, 1, want=True)
    effects = rig.contribute("a", 0, 0)
    (apply,) = of(ApplyRound, effects)
    assert [c.slot for c in apply.contributions] == [0]
    assert buckets(effects) == [("b", 0, 1, "current"), ("b", 1, 1, "current")]


def test_a_round_without_data_is_skipped_and_its_parameters_stay() -> None:
    rig = ShardRig()
    rig.run_round()
    rig.empty("a", 1, 0, want=True)
    effects = rig.empty("a", 1, 1)
    assert [e.step for e in of(RoundSkipped, effects)] == [1]
    assert not of(ApplyRound, effects)
    assert buckets(effects) == [("a", 0, 2, "current"), ("a", 1, 2, "current")]
    assert buckets(rig.pull("b", 1)) == [("b", 0, 1, "current")]  # version 1 and 2 have the same bytes


def test_an_empty_contribution_replaces_half_a_one_but_not_a_whole_one() -> None:
    rig = ShardRig()
    rig.push("a", 0, 0, 0)
    assert counted(rig.empty("b", 0, 0)) == []
    assert counted(rig.push("a", 0, 0, 1)) == ["duplicate-push"]
    rig.push("a", 0, 1, 0)
    (apply,) = of(ApplyRound, rig.push("a", 0, 1, 1))
    assert [c.slot for c in apply.contributions] == [1]
    assert counted(rig.empty("b", 0, 1)) == ["late-push"]


def test_a_departed_trainers_contribution_counts_once_and_is_gone_with_its_step() -> None:
    rig = ShardRig()
    rig.contribute("b", 0, 1, want=True)
    rig.feed(PeerLeft("b"))
    effects = rig.contribute("a", 0, 0)
    (apply,) = of(ApplyRound, effects)
    assert [c.slot for c in apply.contributions] == [0, 1]
    assert buckets(effects) == []
    assert rig.machine.round.missing() == {0: (0, 1), 1: (0, 1)}
    assert codes(rig.pull("b", 1)) == ["unknown-peer"]


# -- steps that are over, or not yet there ------------------------------------------------------------------------


def test_a_push_of_a_past_step_changes_nothing_and_is_answered_with_the_current_parameters() -> None:
    rig = ShardRig()
    rig.run_round()
    effects = rig.push("b", 0, 0, 0, want=True, payload="late")
    assert counted(effects) == ["late-push"]
    assert buckets(effects) == [("b", 0, 1, "current")]
    assert rig.machine.round.missing() == {0: (0, 1), 1: (0, 1)}


def test_a_push_from_the_future_means_that_this_shard_is_behind() -> None:
    rig = ShardRig(version=2)
    effects = rig.push("a", 3, 0, 0)
    assert codes(effects) == ["future-step"]
    assert [e.generation for e in of(RequestRollback, effects)] == [0]
    assert not of(RequestRollback, rig.push("b", 3, 1, 0))  # asked a moment ago
    assert of(RequestRollback, rig.pass_time(1.0) + rig.push("b", 3, 1, 0))


def test_pulls_the_shard_keeps_the_version_before() -> None:
    rig = ShardRig()
    assert buckets(rig.pull("a", -1, 1)) == [("a", 1, 0, "current")]
    rig.run_round()
    assert buckets(rig.pull("a", 1)) == [("a", 0, 1, "current")]
    assert buckets(rig.pull("a", 0)) == [("a", 0, 0, "previous")]
    assert rig.pull("a", 2) == []
    assert buckets(rig.run_round()) == [("a", 0, 2, "current")]
    assert codes(rig.pull("a", 0)) == ["gone"]


def test_a_pull_of_the_version_before_that_a_restart_lost_asks_for_a_rollback() -> None:
    rig = ShardRig(version=4)
    effects = rig.pull("a", 3)
    assert codes(effects) == ["gone"]
    assert of(RequestRollback, effects)


# -- who may say what ---------------------------------------------------------------------------------------------


def test_older_generations_are_refused_with_the_current_one() -> None:
    rig = ShardRig(generation=3, version=5)
    effects = rig.push("a", 5, 0, 0, generation=2)
    (refused,) = [e.message for e in effects if codes([e])]
    assert (refused.code, refused.generation, refused.version) == ("stale-generation", 3, 5)
    assert codes(rig.feed(Received("a", Pull(2, 5, 0)))) == ["stale-generation"]
    assert rig.machine.round.missing() == {0: (0, 1), 1: (0, 1)}


def test_newer_generations_are_refused_until_the_watch_has_told_of_them() -> None:
    assert codes(ShardRig(generation=3).push("a", 0, 0, 0, generation=4)) == ["not-ready"]


def test_strangers_are_refused() -> None:
    rig = ShardRig()
    assert codes(rig.feed(Received("x", Push(0, 0, 0, 0, 4, True), "bits"))) == ["unknown-peer"]
    for run in ("other", "", "j\n", "\ud800"):
        refused = [e.message for e in rig.feed(Received("x", Hello(run, "x"))) if isinstance(e, Reply)]
        assert refused == [Refused("denied", "", -1, -1)], "a stranger is told nothing"
    assert codes(rig.feed(Received("x", Query()))) == ["unknown-peer"]
    effects = rig.feed(Received("x", Hello("j", "x")), Received("x", Query()))
    assert [e.message for e in of(Welcome, effects)] == [Welcome(0, "i0", 0, 0)] * 2


@pytest.mark.parametrize(
    ("message", "payload", "fault", "says"),
    [
        (Push(0, 0, 2, 0, 4, False), "x", "", "no slot 2"),
        (Push(0, 0, 0, 7, 4, False), "x", "", "no bucket 7"),
        (Push(0, 0, 0, 0, 4, False), None, "", "without a frame"),
        (Push(0, 0, 0, 0, 4, False), "x", "the frame has 3 bytes, not 16", "3 bytes"),
        (Pull(0, 0, 9), None, "", "no bucket 9"),
        (Parameters(0, 0, 0), "x", "", "not for a sync shard"),
    ],
)
def test_malformed_messages_are_refused_counted_and_change_nothing(
    message: Any, payload: Any, fault: str, says: str
) -> None:
    rig = ShardRig()
    effects = rig.feed(Received("a", message, payload, fault))
    assert codes(effects) == ["malformed"]
    assert counted(effects) == ["refused-malformed"]
    assert says in effects[0].message.reason
    assert rig.machine.round.missing() == {0: (0, 1), 1: (0, 1)}


def test_buckets_of_one_contribution_agree_on_its_samples() -> None:
    rig = ShardRig()
    rig.push("a", 0, 0, 0, samples=4)
    assert codes(rig.push("b", 0, 0, 1, samples=5)) == ["malformed"]
    rig.push("a", 0, 0, 1, samples=4)
    (apply,) = of(ApplyRound, rig.contribute("a", 0, 1))
    assert apply.contributions[0].samples == 4


# -- rollback and recovery ----------------------------------------------------------------------------------------


def test_a_rollback_drops_contributions_and_waits_and_tells_everyone() -> None:
    rig = ShardRig(version=6)
    rig.push("a", 6, 0, 0, want=True)
    rig.pull("a", 7, 1)
    effects = rig.feed(Rollback(1, 4))
    assert [(e.peer, e.message.code) for e in effects if codes([e])] == [("a", "stale-generation")]
    assert {(e.peer, e.message) for e in of(Welcome, effects)} == {(p, Welcome(0, "i0", 1, 4)) for p in ("a", "b")}
    assert (rig.machine.version, rig.machine.round.missing()) == (4, {0: (0, 1), 1: (0, 1)})
    assert codes(rig.pull("a", 3)) == ["gone"]
    assert buckets(rig.run_round()) == []
    assert rig.machine.version == 5


def test_recovery_mode_asks_for_a_rollback_when_the_first_barrier_times_out() -> None:
    rig = ShardRig(version=3, recovery=True, recovery_timeout=5.0)
    rig.contribute("a", 3, 0)
    assert rig.pass_time(4.9, Tick()) == []
    (request,) = rig.pass_time(0.1, Tick())
    assert isinstance(request, RequestRollback)
    assert "step 3, timed out without slot 1 (buckets 0, 1)" in request.reason
    assert rig.pass_time(1.0, Tick()) == []
    assert of(RequestRollback, rig.pass_time(4.0, Tick()))  # still nobody answered
    rig.feed(Rollback(1, 3))
    assert rig.pass_time(100.0, Tick()) == []


def test_recovery_mode_can_proceed_with_what_is_there_and_names_what_is_missing() -> None:
    rig = ShardRig(slots=3, recovery=True, recovery_timeout=5.0, on_barrier_timeout="proceed")
    assert counted(rig.pass_time(5.0, Tick())) == ["barrier-timeout"]
    rig.contribute("a", 0, 0)
    rig.push("a", 0, 1, 0)
    effects = rig.pass_time(5.0, Tick())
    assert counted(effects) == ["missing-contribution"] * 2
    assert [c.slot for c in of(ApplyRound, effects)[0].contributions] == [0]
    assert counted(rig.push("a", 0, 1, 1)) == ["late-push"]
    rig.contribute("a", 1, 0)
    assert rig.pass_time(100.0, Tick()) == []


def test_nothing_is_late_of_a_step_that_is_not_wanted() -> None:
    rig = ShardRig(version=3, recovery=True, recovery_timeout=5.0)
    rig.feed(StepsWanted(3))
    assert rig.machine.paused
    assert rig.pass_time(100.0, Tick()) == []
    rig.feed(StepsWanted(6))
    assert not rig.machine.paused
    assert rig.pass_time(4.9, Tick()) == [], "its time counts from now"
    assert of(RequestRollback, rig.pass_time(0.2, Tick()))


# -- checkpoints and the end --------------------------------------------------------------------------------------


def test_checkpoints_are_taken_at_the_ends_of_passes() -> None:
    rig = ShardRig(checkpoint_every=5, checkpoint_steps=frozenset({2, 4}))
    taken = [of(TakeCheckpoint, rig.run_round()) for _ in range(5)]
    assert [[e.step for e in found] for found in taken] == [[], [2], [], [4], [5]]


def test_checkpoints_are_taken_at_common_steps() -> None:
    rig = ShardRig(checkpoint_every=3, version=2)
    assert [e.step for e in of(TakeCheckpoint, rig.run_round())] == [3]
    assert not of(TakeCheckpoint, rig.run_round())
    assert counted(rig.feed(CheckpointAt(4))) == ["late-checkpoint"]
    rig.feed(CheckpointAt(5))
    assert [e.step for e in of(TakeCheckpoint, rig.run_round())] == [5]


def test_the_last_version_is_saved_and_finishes_the_job() -> None:
    rig = ShardRig(total_steps=1)
    effects = rig.run_round()
    assert [e.step for e in of(TakeCheckpoint, effects)] == [1]
    assert of(Finished, effects) == [Finished(1)]
    assert codes(rig.push("a", 1, 0, 0)) == ["complete"]
    assert codes(rig.pull("a", 2)) == ["malformed"], "a version that the job does not have"
    assert buckets(rig.push("a", 0, 0, 0, want=True)) == [("a", 0, 1, "current")]
    assert buckets(rig.pull("b", 1)) == [("b", 0, 1, "current")]


def test_a_rollback_takes_a_finished_shard_back() -> None:
    rig = ShardRig(total_steps=1)
    rig.run_round()
    assert not of(Finished, rig.feed(Rollback(1, 0)))
    assert of(Finished, rig.run_round())


# -- faults of the program ----------------------------------------------------------------------------------------


def test_an_illegal_event_raises_with_the_story_of_its_step() -> None:
    rig = ShardRig()
    rig.push("a", 0, 1, 0)
    with pytest.raises(IllegalTransition, match="knows no event"):
        rig.feed("what")
    with pytest.raises(IllegalTransition, match=r"step 0 in phase collecting(.|\n)*kept bucket 0 of slot 1"):
        rig.feed(PartialsReady(0, "own"))


def test_invariants_notice_a_state_that_contradicts_itself() -> None:
    shard = SyncShard(
        SyncOptions(shard=0, shards=1, slots=1, buckets=(0,), total_steps=5), incarnation="i", generation=0, version=0
    )
    shard.step(Started(), 0.0)
    shard.version = 1
    with pytest.raises(IllegalTransition, match="the round is that of the version"):
        shard.check_invariants()
