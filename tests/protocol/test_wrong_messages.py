"""Messages that no machine of ours sends: what each was found to do, and that it does nothing now."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from graphft.runtime.protocol.events import Fail, FromShard, Received, SendShard, Took
from graphft.runtime.protocol.machine import LONGEST
from graphft.runtime.protocol.messages import (
    BatchPush,
    GetTasks,
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
    decode,
    encode,
)
from tests.protocol.rigs import ShardRig, TrainerRig, codes, of
from tests.protocol.test_async_shard import AsyncRig
from tests.protocol.test_async_trainer import Rig as AsyncTrainerRig

HUGE = 2**63 - 1


# -- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [Partials(0, 1, 1), PartialsQuery(0, 0, 1)])
def test_partial_sums_are_no_business_of_a_job_without_them(message: Message) -> None:
    rig = ShardRig(shards=2)
    rig.run_round()
    effects = rig.feed(Received("a", message))
    assert codes(effects) == ["malformed"]
    assert not of(SendShard, effects)
    assert rig.machine.partial_sums.missing() == (1,)


@pytest.mark.parametrize("message", [Push(0, -1, 0, 0, 4, False), Push(0, HUGE, 0, 0, 4, False), Pull(0, 11, 0)])
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
    rig = AsyncRig()
    effects = rig.feed(Received("a", message, b"frame" if isinstance(message, BatchPush) else None))
    assert codes(effects) == ["malformed"]
    assert (rig.machine.ledger.export(), rig.machine.copies, rig.machine.version) == ({}, {}, 0)


def test_a_shard_knows_the_newest_connection_of_each_peer() -> None:
    rig = ShardRig()
    rig.feed(Received("a again", Hello("j", "a")))
    assert rig.machine.peers == {"b": "b", "a again": "a"}
    assert codes(rig.feed(Received("a", Query()))) == ["unknown-peer"], "it says hello again"


def test_a_story_cuts_what_a_peer_sent() -> None:
    machine = ShardRig().machine
    assert len(machine.tell("x" * 10**6)) == LONGEST + 3
    assert all(len(line) < LONGEST + 20 for line in machine.story)


@pytest.mark.parametrize(
    "message",
    [
        Push(0, 0, 0, 0, 0, False),
        Welcome(0, "A", 0, -5),
        Refused("nonsense", "", 0, 0),  # type: ignore[arg-type]
        GetTasks(1, "a", 0, 1, 0, 2**63),
    ],
)
def test_numbers_that_cannot_be_are_not_decoded(message: Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode(message))


# -- trainers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (Welcome(0, "A", 0, 11), None),
        (Welcome(0, "A", 0, 0), b"frame"),
        (Parameters(0, 0, 7), b"frame"),
        (Parameters(0, 0, 0), None),
        (Parameters(0, HUGE, 0), b"frame"),
        (Refused("gone", "", 0, HUGE), None),
    ],
)
def test_a_wrong_answer_ends_a_sync_trainer_by_a_failure_that_says_so(message: Message, frame: Any) -> None:
    rig = TrainerRig()
    (fail,) = of(Fail, rig.feed(FromShard(0, message, frame)))
    assert "of shard 0" in fail.reason


@pytest.mark.parametrize(
    ("message", "frame"),
    [
        (Parameters(0, 0, 7), b"frame"),
        (Ledger(0, 7, [(-HUGE, 2)]), None),
        (Ledger(0, 7, [(2, 1)]), None),
        (Ledger(0, 7, [(1, 2), (0, 1)]), None),
        (Ledger(0, 7, [(0, 1), (1, 2)]), None),
    ],
)
def test_a_wrong_answer_ends_an_async_trainer_by_a_failure_that_says_so(message: Message, frame: Any) -> None:
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
