"""Event stories of the coordinator's queues in sync mode: the plan says whose task it is, the slot's claim who may."""

from __future__ import annotations

from typing import Any

import pytest

from graphft.plan import Plan
from graphft.runtime.protocol.messages import GetTasks, RequeueTasks, TasksRefused
from graphft.runtime.protocol.task_events import Fenced
from tests.protocol.task_rigs import SMALL, TaskRig

STEPS = SMALL.start_steps


@pytest.fixture
def rig() -> TaskRig:
    return TaskRig(sync=True)


def test_the_first_pass_begins_when_it_is_asked_for(rig: TaskRig) -> None:
    assert (rig.machine.current, rig.machine.counts()) == (-1, {})
    assert rig.get_slot("a", 0, [2, 0]).keys() == {0, 2}
    assert (rig.machine.current, rig.counts()) == (0, (2, 2, 0))
    assert rig.fences == (("slot", 0, 7),), "to be compared with what is saved"


def test_who_holds_the_slot_displaces_who_held_it(rig: TaskRig) -> None:
    zombie = rig.get_slot("a", 0, [0, 1])
    for _ in range(5):
        for trainer in "bc":
            held = rig.get_slot(trainer, 0, [0, 1])
    assert rig.finish("a", zombie) == [0, 1]
    assert rig.release("a", zombie) == [0, 1]
    rig.renew("a", zombie)
    assert rig.counts() == (2, 2, 0)
    assert {t.todo.failures for t in rig.machine.passes[0].open.values()} == {0}
    assert rig.finish("c", held) == []


def test_a_call_whose_slot_is_anothers_by_now_is_refused(rig: TaskRig) -> None:
    call = GetTasks(4, "a", 0, 0, 1, 8, [3])
    (answer,) = rig.feed(Fenced(b"p", call))
    assert answer.message == TasksRefused(4, "fenced", "slot 1 is not a's")
    assert rig.machine.counts() == {}


def test_what_was_done_in_a_generation_that_was_rolled_back_is_to_do_again(rig: TaskRig) -> None:
    rig.finish("a", rig.get_slot("a", 0, [0, 1]))
    assert rig.counts() == (2, 0, 2)
    again = rig.get_slot("a", 0, [1], generation=1)
    assert rig.counts() == (2, 1, 1)
    assert rig.finish("a", again) == []
    assert rig.counts() == (2, 0, 2)


def test_a_rollback_to_a_pass_that_was_closed(rig: TaskRig) -> None:
    held = rig.get_slot("a", 0, [0, 1, 2])
    late = rig.get_slot("b", 1, [3])
    rig.finish("a", held)
    rig.get_slot("a", 0, [0], 1, lowest=STEPS[1] - 1)
    assert (rig.machine.current, rig.counts(0), rig.counts(1)) == (1, (0, 1, 3), (3, 1, 0))
    rig.get_slot("b", 1, [3])
    assert rig.machine.current == 1
    rig.get_slot("a", 0, [1], 1, lowest=STEPS[1])
    assert 0 not in rig.machine.passes, "every shard has all of it, though b did not say so"
    assert not [key for key in rig.saved.groups if key[0] == 0]
    assert rig.finish("b", late) == []
    rig.crash()
    rig.get_slot("b", 1, [3], 0, generation=1)
    assert (rig.machine.current, rig.counts(0), rig.counts(1)) == (0, (0, 1, 3), (2, 2, 0))
    rig.get_slot("b", 1, [2], 1, generation=1, lowest=STEPS[1])
    assert (rig.machine.current, rig.machine.begun) == (1, 1)
    assert 0 not in rig.machine.passes


def test_a_pass_closes_only_when_it_is_applied_and_left(rig: TaskRig) -> None:
    rig.get_slot("a", 0, [0], lowest=STEPS[3])
    assert rig.counts(0) == (3, 1, 0), "it is the pass that is asked for"
    rig.get_slot("a", 0, [0], 2, lowest=STEPS[1])
    rig.get_slot("b", 1, [1], 1, lowest=STEPS[1])
    assert sorted(rig.machine.passes) == [1, 2]
    rig.get_slot("a", 0, [0], 2, lowest=STEPS[2])
    assert sorted(rig.machine.passes) == [2]


def test_a_pass_that_is_wholly_finished_leaves_no_records_behind() -> None:
    rig = TaskRig(Plan([4, 4], slots=1, batch_size=2, passes=2), sync=True)
    rig.finish("a", rig.get_slot("a", 0, [0, 1]))
    assert rig.saved.groups
    rig.crash()
    rig.get_slot("a", 0, [0], 1)
    assert {p for p, _ in rig.saved.groups} == {1}


@pytest.mark.parametrize(
    "call",
    [
        *(GetTasks(1, "a", 0, 0, slot, 8, [0]) for slot in (-1, 2, 2**70)),
        *(GetTasks(1, "a", p, 0, 1, 8, []) for p in (-1, 3)),
        *(GetTasks(1, "a", 0, 0, 1, 8, [0, c]) for c in (-1, 4)),
        RequeueTasks(1, "a", 0, [(4, 0)]),
    ],
    ids=str,
)
def test_malformed_calls_change_nothing(rig: TaskRig, call: Any) -> None:
    rig.get_slot("b", 0, [1])
    assert rig.refused(call) == "malformed"
