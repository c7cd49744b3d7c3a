"""Event stories of the coordinator's queues in async mode, each named after the rule it tells."""

from __future__ import annotations

import math
from typing import Any

import pytest

from graphft.runtime.protocol.messages import (
    FailTask,
    FinishTasks,
    GetTasks,
    ReleaseTasks,
    RenewTasks,
    RequestSaveModel,
    RequeueTasks,
    Tasks,
    TasksSettled,
)
from graphft.runtime.protocol.task_events import Answer, Asked, Fenced, TookAway
from tests.protocol.task_rigs import WIDE, TaskRig

ALL = {0, 1, 2, 3}


def take_all(rig: TaskRig, trainer: str = "a") -> dict[int, int]:
    """All free tasks, call by call: one call gives a fair share."""
    held: dict[int, int] = {}
    while found := rig.get(trainer, 10):
        held |= found
    return held


# -- giving out -------------------------------------------------------------------------------------------------------


def test_each_task_is_given_to_one_trainer() -> None:
    rig = TaskRig()
    a, b = rig.get("a", 2), rig.get("b", 2)
    rest = take_all(rig, "c")
    assert [*a, *b, *rest] == [*{**a, **b, **rest}]
    assert {*a, *b, *rest} == ALL
    assert len({*a.values(), *b.values(), *rest.values()}) == 4, "each attempt has a number of its own"
    assert rig.counts() == (0, 4, 0)
    assert rig.get("a", 2) == {}


def test_the_same_call_gets_the_same_answer() -> None:
    rig = TaskRig()
    call = GetTasks(1, "a", 0, 1)
    first = rig.ask(call)
    assert rig.ask(call) == first
    rig.crash()
    assert rig.ask(call) == first, "its coordinator died before it answered"
    assert rig.counts() == (3, 1, 0)


def test_an_echo_of_a_call_gets_nothing() -> None:
    rig = TaskRig()
    echo = GetTasks(1, "a", 0, 1)
    given = rig.ask(echo)
    rig.ask(GetTasks(2, "a", 0, 1))
    assert rig.ask(echo) is None
    rig.ask(FinishTasks(3, "a", 0, given.tasks))
    assert rig.ask(GetTasks(2, "a", 0, 1)) is None
    assert rig.counts() == (2, 1, 1)


# -- finishing --------------------------------------------------------------------------------------------------------


def test_a_zombie_finishes_nothing_of_its_successors() -> None:
    rig = TaskRig()
    zombie = take_all(rig)
    rig.live("bc")
    successor = take_all(rig, "b")
    assert successor.keys() == zombie.keys()
    rig.live("abc")
    assert rig.finish("a", zombie) == [*zombie]
    assert rig.finish("a", successor) == [*successor], "its number alone is not enough"
    assert rig.finish("b", zombie) == [*zombie]
    assert rig.release("a", zombie) == [*zombie]
    rig.renew("a", zombie)
    assert rig.counts() == (0, 4, 0)
    assert rig.finish("b", successor) == []


def test_what_a_shard_forgot_meanwhile_is_to_do_again() -> None:
    rig = TaskRig()
    held = rig.get("a")
    (chunk,) = held
    call = FinishTasks(2, "a", 0, [*held.items()], [11, 12])
    copy = rig.saved.load(rig.options, rig.now)
    (answer,) = copy.step(Asked(b"p", call), rig.now)
    assert isinstance(answer, Answer)
    assert answer.fences == (("shard", 0, 11), ("shard", 1, 12)), "to be compared with what is saved"
    (fenced,) = rig.feed(Fenced(b"p", call))  # shard 1 has begun another generation: memory is read anew
    assert fenced.message == TasksSettled(2, [chunk])
    assert rig.counts() == (4, 0, 0)
    assert rig.machine.passes[0].open[chunk].todo.failures == 0


# -- coming back ------------------------------------------------------------------------------------------------------


def test_what_a_trainer_held_that_vanished_is_todo_and_counts_when_it_is_claimed() -> None:
    rig = TaskRig()
    held = take_all(rig)
    rig.live("bc")
    assert rig.counts() == (4, 0, 0)
    again = take_all(rig, "b")
    assert again.keys() == held.keys()
    assert not set(again.values()) & set(held.values())
    assert {t.todo.failures for t in rig.machine.passes[0].open.values()} == {1}


def test_a_task_that_is_not_renewed_is_taken_away() -> None:
    rig = TaskRig()
    a, b = rig.get("a"), rig.get("b")
    assert rig.pass_time(60.0) == []
    rig.renew("b", b)
    rig.crash()
    rig.renew("b", b)
    assert rig.pass_time(60.0) == []
    rig.renew("b", b)
    (taken,) = rig.pass_time(1.0)
    assert taken == TookAway(0, next(iter(a)), "a", -1, 61.0)
    assert rig.counts() == (3, 1, 0)


def test_a_renewal_frees_what_its_trainer_does_not_know_of() -> None:
    rig = TaskRig()
    lost, known = rig.get("a"), rig.get("a")
    later = rig.get("a")
    rig.renew("a", known, known=2)
    assert rig.machine.passes[0].open.keys() == {*lost, *known, *later}
    assert [rig.machine.passes[0].open[c].holder for c in (*lost, *known, *later)] == ["", "a", "a"]
    assert rig.machine.passes[0].open[next(iter(lost))].todo.failures == 0
    rig.renew("a", {})
    assert rig.counts() == (4, 0, 0)


def test_a_task_at_which_too_many_vanish_is_hopeless_and_goes_on_without_its_rest() -> None:
    rig = TaskRig()
    for _ in range(3):
        assert take_all(rig).keys() == ALL
        assert not rig.hopeless
        rig.live("bc")
        rig.live("abc")
    assert rig.get("a") == {}
    assert {chunk for _, chunk in rig.hopeless} == ALL
    assert rig.finish("a", take_all(rig)) == []
    assert rig.machine.current == 1


# -- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["released", "fenced", "failed", "vanished", "hopeless"])
def test_a_pass_rolls_when_its_last_task_came_back_before(how: str) -> None:
    rig = TaskRig()
    *rest, (chunk, attempt) = take_all(rig).items()
    rig.finish("a", dict(rest))
    if how == "released":
        rig.release("a", {chunk: attempt})
    elif how == "fenced":
        rig.feed(Fenced(b"p", FinishTasks(9, "a", 0, [(chunk, attempt)], [1, 1])))
    elif how == "failed":  # what is discarded of it, or counted, is the driver's to write
        rig.machine.put(0, chunk, rig.machine.passes[0].open[chunk].todo.failed(2, ()))
    else:
        for _ in range(3 if how == "hopeless" else 1):
            rig.get("a")
            rig.live("bc")
            rig.live("abc")
    while not (held := rig.get("b")):
        assert how == "hopeless"
    assert bool(rig.hopeless) == (how == "hopeless")
    rig.finish("b", held)
    assert rig.machine.current == 1
    for index in (1, 2):
        rig.finish("a", take_all(rig), index)
    assert rig.machine.current == 3
    assert rig.ask(GetTasks(rig.number("a"), "a", 3, 1)) == Tasks(rig.numbers["a"], 3, [])


def test_a_shard_that_went_back_has_its_tasks_done_again() -> None:
    rig = TaskRig()
    first = take_all(rig)
    rig.finish("a", first)
    second = rig.get("b")
    assert rig.requeue({0: 0, 2: 3}) == []
    assert rig.requeue({0: 0, 2: 3}) == [0, 2], "they are todo"
    assert (rig.machine.current, rig.counts(0), rig.counts(1)) == (0, (2, 0, 2), (3, 1, 0))
    assert [rig.machine.passes[0].open[c].todo.progress for c in (0, 2)] == [0, 3]
    assert rig.get("b", pass_index=1) == {}
    again = take_all(rig)
    assert again.keys() == {0, 2}
    assert rig.requeue({0: 0}) == [0], "it is pending: its holder asks the shard for its ledger"
    assert rig.finish("b", second, 1) == [], "a task of the later pass is finished meanwhile"
    rig.crash()
    rig.finish("a", again)
    assert (rig.machine.current, rig.counts(1)) == (1, (3, 0, 1))


def test_a_pass_that_was_over_and_forgotten_comes_back_with_all_that_is_done() -> None:
    rig = TaskRig(WIDE)
    for index in (0, 1):
        rig.finish("a", take_all(rig), index)
    assert not rig.saved.groups
    assert rig.requeue({300: 0}) == []
    rig.crash()
    assert (rig.machine.current, rig.counts(0)) == (0, (1, 0, 5))
    rig.finish("a", take_all(rig))
    assert rig.machine.current == 2


def test_nothing_is_given_after_the_last_step() -> None:
    rig = TaskRig()
    held = rig.get("a")
    for _ in range(2):
        assert rig.close() == []
        assert rig.machine.current == 3
        assert rig.get("b") == {}
        assert rig.finish("a", held) == []
        assert rig.requeue({0: 0}) == [0]
        rig.crash()
    assert not rig.saved.groups


# -- the one that saves the model -------------------------------------------------------------------------------------


def test_one_trainer_saves_the_model_for_a_time() -> None:
    rig = TaskRig()
    assert rig.save_model("a", 30.0) == (True, 30.0)
    rig.pass_time(10.0)
    assert rig.save_model("b", 99.0) == (False, 20.0)
    assert rig.save_model("a", 5.0) == (True, 20.0)
    assert rig.save_model("a", 40.0) == (True, 40.0), "what it is granted, it has"
    rig.pass_time(20.0)
    rig.crash()
    assert rig.save_model("b", 99.0) == (False, 20.0)
    rig.pass_time(20.0)
    assert rig.save_model("b", 5.0) == (True, 5.0)
    assert rig.save_model("a", 5.0) == (False, 5.0)


# -- malformed calls --------------------------------------------------------------------------------------------------

NONE = [(0, 4), (0, -1), (-1, 0), (3, 0), (0, 2**70)]
"""No tasks."""


@pytest.mark.parametrize(
    "call",
    [
        *(FinishTasks(1, "a", p, [(c, 1)]) for p, c in NONE),
        *(ReleaseTasks(1, "a", p, [(c, 1, 0)]) for p, c in NONE),
        *(RenewTasks(1, "a", [(p, c, 1, 0)]) for p, c in NONE),
        *(RequeueTasks(1, "a", p, [(c, 0)]) for p, c in NONE),
        *(FailTask(1, "a", p, c, 1, 0, "") for p, c in NONE),
        *(ReleaseTasks(1, "a", 0, [(0, 1, applied)]) for applied in (-1, 5)),
        *(RenewTasks(1, "a", [(0, 0, 1, applied)]) for applied in (-1, 5)),
        *(RequeueTasks(1, "a", 0, [(0, applied)]) for applied in (-1, 5)),
        *(FinishTasks(1, "a", 0, [(0, 1)], [1] * count) for count in (1, 3)),
        *(FailTask(1, "a", 0, 0, 1, batch, "") for batch in (-1, 4)),
        *(FailTask(1, "a", 0, 0, 1, 0, "", [record]) for record in (-1, 8)),
        GetTasks(1, "a", 0, 1, slot=0),
        GetTasks(1, "a", 0, 1, chunks=[0]),
        *(RequestSaveModel(1, "a", seconds) for seconds in (0.0, -1.0, 1e9, math.inf, math.nan)),
    ],
    ids=str,
)
def test_malformed_calls_change_nothing(call: Any) -> None:
    rig = TaskRig()
    rig.get("b")
    assert rig.refused(call) == "malformed"
    assert rig.machine.problem(call)
