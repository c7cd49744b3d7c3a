"""Messages that no machine of ours sends: what each was found to do, and that it does nothing now."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.runtime.protocol.events import Fail, FromShard, Received, SendShard, Took
from graphft.runtime.protocol.machine import LONGEST, Story
from graphft.runtime.protocol.messages import (
    BatchPush,
    Hello,
    Ledger,
    LedgerQuery,
    Message,
    Parameters,
    Partials,
    PartialsQuery,
    Pull,
    Push,
    Query,
    Refused,
    Welcome,
)
from tests.protocol.rigs import ShardRig, TrainerRig, codes, of
from tests.protocol.test_async_shard import AsyncRig
from tests.protocol.test_async_trainer import Rig as AsyncTrainerRig

HUGE = 2**63 - 1


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [Partials(0, 1, 1), PartialsQuery(0, 0, 1), PartialsQuery(0, 0, HUGE)])
def test_partial_sums_are_no_business_of_a_job_without_them(message: Message) -> None:
    """One `PartialsQuery` ended any sync shard that was past a step; `Partials` were kept at any size."""
    rig = ShardRig(shards=2)
    rig.run_round()
    effects = rig.feed(Received("a", message))
    assert codes(effects) == ["malformed"]
    assert not of(SendShard, effects)
    assert rig.machine.partial_sums.missing() == (1,)


@pytest.mark.parametrize(
    "message",
    [
        Push(0, -1, 0, 0, 4, False),
        Push(0, 11, 0, 0, 4, False),
        Push(0, HUGE, 0, 0, 4, False),
        Pull(0, -2, 0),
        Pull(0, 11, 0),
    ],
)
def test_steps_that_the_job_does_not_have_ask_for_no_rollback(message: Message) -> None:
    rig = ShardRig(total_steps=10)
    effects = rig.feed(Received("a", message, b"frame" if isinstance(message, Push) else None))
    assert [type(e).__name__ for e in effects] == ["Reply", "Count"]
    assert codes(effects) == ["malformed"]


@pytest.mark.parametrize(
    "message",
    [
        BatchPush(0, 0, 4, 0, 4, 0, 2, 0),
        BatchPush(0, 2, 0, 0, 4, 0, 2, 0),
        BatchPush(0, 0, 0, 0, 1, 0, 2, 0),
        BatchPush(0, 0, 0, 0, HUGE, 0, 2, 0),
        BatchPush(0, 0, 0, 0, 4, 0, 2, 1),
        LedgerQuery(0, 4),
        LedgerQuery(-1, 0),
    ],
)
def test_batches_that_the_plan_does_not_have(message: Message) -> None:
    """Each made the ledger longer; with another number of batches one made its chunk look applied."""
    rig = AsyncRig()
    effects = rig.feed(Received("a", message, b"frame" if isinstance(message, BatchPush) else None))
    assert codes(effects) == ["malformed"]
    assert (rig.machine.ledger.export(), rig.machine.copies, rig.machine.version) == ({}, {}, 0)


@pytest.mark.parametrize("rig", [ShardRig(max_peers=3), AsyncRig(max_peers=3, compensate=True)], ids=["sync", "async"])
def test_peers_have_a_bound_and_one_connection_each(rig: Any) -> None:
    """Every connection was remembered until its trainer's lease ended."""
    rig.feed(Received("a again", Hello("j", "p", "a")))
    assert list(rig.machine.peers) == ["b", "a again"], "the newest of a name"
    for n in range(20):
        rig.feed(Received(f"c{n}", Hello("j", "p", f"c{n}")), Received(f"c{n}", Pull(0, 0, 0)))
    assert list(rig.machine.peers) == ["c17", "c18", "c19"]
    assert codes(rig.feed(Received("b", Query()))) == ["unknown-peer"], "it says hello again"


def test_a_story_cuts_what_a_peer_sent() -> None:
    """512 lines of a megabyte each."""
    story = Story()
    assert len(story.tell("x" * 10**6)) == LONGEST + 3
    assert len(story.of()[0]) < LONGEST + 20


# -- trainers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (Welcome(0, "A", 0, -5), None),
        (Welcome(0, "A", 0, 11), None),
        (Welcome(0, "A", -1, 0), None),
        (Welcome(0, "A", 0, 0), b"frame"),
        (Parameters(0, 0, 7), b"frame"),
        (Parameters(0, 0, 0), None),
        (Parameters(0, -1, 0), b"frame"),
        (Parameters(0, HUGE, 0), b"frame"),
        (Refused("gone", "", 0, HUGE), None),
        (Refused("nonsense", "", 0, 0), None),
        (Refused("gone", "", -2, 0), None),
    ],
)
def test_a_wrong_answer_ends_a_sync_trainer_by_a_failure_that_says_so(message: Message, frame: Any) -> None:
    """A shard's nonsense was believed: a step -5 was looked up in the plan, a step 2**63 - 1 waited for."""
    rig = TrainerRig()
    (fail,) = of(Fail, rig.feed(FromShard(0, message, frame)))
    assert "of shard 0" in fail.reason


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (Parameters(0, 0, 7), b"frame"),
        (Parameters(0, 0, 0), None),
        (Welcome(0, "i", 0, -1), None),
        (Ledger(0, 7, [(-HUGE, 2)]), None),
        (Ledger(0, 7, [(2, 1)]), None),
        (Ledger(0, 7, [(1, 2), (0, 1)]), None),
        (Ledger(0, 7, [(0, 1), (1, 2)]), None),
    ],
)
def test_a_wrong_answer_ends_an_async_trainer_by_a_failure_that_says_so(message: Message, frame: Any) -> None:
    """A bucket that there is not was a KeyError, a ledger from -2**63 on took all memory."""
    rig = AsyncTrainerRig()
    rig.meet(0)
    rig.feed(Took((0, 7), 3))
    (fail,) = of(Fail, rig.feed(FromShard(0, message, frame)))
    assert "of shard 0" in fail.reason


def test_what_the_driver_finds_wrong_with_a_frame_is_a_failure_too() -> None:
    rigs: list[Any] = [TrainerRig(), AsyncTrainerRig()]
    rigs[1].meet(0)
    for rig in rigs:
        (fail,) = of(Fail, rig.feed(FromShard(0, Parameters(0, 0, 0), b"frame", "expected 8 bytes, got 5")))
        assert "expected 8 bytes" in fail.reason
