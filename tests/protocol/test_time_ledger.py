"""Each second of a job belongs to one category, whatever is seen of the job."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.runtime.protocol.time_ledger import CATEGORIES, GAP_SECONDS, Seen, TimeLedger, goodput_of, in_words

LOOK = 0.5


def split(computing: float = 0.0, data: float = 0.0, shards: float = 0.0) -> dict[str, float]:
    return {"computing": computing, "data": data, "shards": shards, "idle": 0.0}


class Play:
    """A job that is looked at each half second. `pace`: steps of a look."""

    def __init__(self, total: int | None = 1000) -> None:
        self.ledger, self.now = TimeLedger(0.0), 0.0
        self.seen = Seen(0, total, members=frozenset("pt"))

    def look(self, seconds: float = LOOK, **changes: object) -> str:
        self.now += seconds
        self.seen = replace(self.seen, **changes)  # type: ignore[arg-type]
        mode = self.ledger.step(self.seen, self.now)
        assert sum(self.ledger.seconds.values()) == pytest.approx(self.ledger.wall)
        return mode

    def train(self, looks: int, pace: int = 5) -> None:
        for _ in range(looks):
            assert self.look(step=self.seen.step + pace) == "training"

    @property
    def spent(self) -> dict[str, float]:
        return {name: round(s, 3) for name, s in self.ledger.seconds.items() if round(s, 3)}


def begun() -> Play:
    play = Play()
    assert play.look(members=frozenset()) == "starting"
    assert play.look(members=frozenset("pt")) == "starting"
    assert play.look(step=5) == "training"
    play.train(19)
    return play


def test_a_job_that_trains() -> None:
    play = begun()
    assert play.spent == {"starting": 1.5, "productive": 9.5}
    assert play.ledger.pace == pytest.approx(10)
    assert play.ledger.left() == pytest.approx((1000 - 100) / 10)
    assert goodput_of(play.ledger.export()) == round(9.5 / 11, 4)
    assert goodput_of(TimeLedger(0.0).export()) is None
    play.look(seconds=GAP_SECONDS + 1, step=500)
    assert play.spent["idle"] == GAP_SECONDS + 1, "its launcher was stopped"


def test_steps_of_many_seconds_are_productive_from_their_first_look_on() -> None:
    play = Play()
    play.look(trainers={"t": split(0.1)})
    for n in range(100):
        play.look(trainers={"t": split(0.1 + n / 2)}, step=n // 20)
    assert play.spent == {"starting": 0.5, "productive": 50.0}
    assert play.ledger.left() == pytest.approx((1000 - 4) * 10, rel=0.3)


def test_steps_that_a_rollback_has_undone_are_computed_again() -> None:
    play = begun()
    assert play.look(step=102, members=frozenset("t")) == "recovering"
    assert play.ledger.left() is None
    assert play.look(step=80, generation=1, members=frozenset("tq")) == "recovering"
    assert play.look(step=85) == "training"
    play.train(3)
    assert play.spent == {"starting": 1.5, "productive": 9.5 + 0.2, "recovering": 0.3 + 0.5, "redone": 2.0}
    play.look(step=105)
    (recovery,) = play.ledger.recoveries
    assert recovery.seconds == pytest.approx(0.8)
    assert recovery.redone == pytest.approx(2.2)
    assert play.spent["productive"] == pytest.approx(9.5 + 0.2 + 0.3)


def test_while_a_shard_is_not_there_no_step_is_made() -> None:
    play = begun()
    assert play.look(step=101, members=frozenset("t"), whole=False) == "recovering"
    assert play.look(step=104) == "recovering"
    assert play.look(step=80, generation=1, members=frozenset("tq"), whole=True) == "recovering"
    assert play.look(step=85) == "training"
    assert len(play.ledger.recoveries) == 1


def test_waits_for_data_and_for_a_straggler() -> None:
    play = Play()
    play.look(trainers={"a": split(0.1), "b": split(0.1)})
    for n in range(41):
        t = n * LOOK
        play.look(step=n, trainers={"a": split(0.3 * t, 0.2 * t, 0.5 * t), "b": split(0.9 * t, 0.0, 0.1 * t)})
    spent = play.spent
    assert spent["data"] == pytest.approx(0.1 * 20, abs=0.6)
    assert spent["straggler"] == pytest.approx(0.2 * 20, abs=1.1)
    assert spent["productive"] == pytest.approx(0.7 * 20, abs=1.7)


def test_a_trainer_that_has_no_work_is_no_straggler() -> None:
    play = Play()
    play.look(trainers={"a": split(0.1), "spare": split()})
    for n in range(41):
        play.look(step=n, trainers={"a": split(n * LOOK * 0.5, shards=n * LOOK * 0.5), "spare": split()})
    assert "straggler" not in play.spent


def test_checkpoints() -> None:
    play = begun()
    for n in range(24):
        play.look(step=105 + n, checkpoints={"p": 1.0 if n < 12 else 1.2} | ({"another": 7.0} if n > 20 else {}))
    assert play.spent["checkpointing"] == 0.2
    assert play.look(step=1000) == "checkpointing"
    assert play.look(members=frozenset()) == "checkpointing", "who leaves at the end is not lost"
    assert play.look(over=True) == "over"
    wall = play.ledger.wall
    assert play.look(seconds=100) == "over"
    assert play.ledger.wall == wall


def test_a_job_that_is_to_wait_is_idle() -> None:
    play = begun()
    assert play.look(waits=True) == "idle"
    play.look()
    assert play.look(waits=False, step=105) == "training"
    assert play.spent == {"starting": 1.5, "productive": 9.5 + 0.5, "idle": 1.0}


def test_what_a_job_waits_for_validations() -> None:
    play = begun()
    assert play.look(validates=True, step=102) == "validating"
    assert play.look(step=104) == "validating"
    assert play.look(validates=False, step=106) == "training"
    play.train(1)
    assert play.spent == {"starting": 1.5, "productive": 9.5 + 3 * 0.2 + 0.5, "validating": 0.9}


def test_the_next_launch_carries_it_on() -> None:
    play = begun()
    kept = json.loads(json.dumps(play.ledger.export()))
    after = TimeLedger.load(kept)
    after.carry(play.now + 30)
    after.step(None, play.now + 31)
    for n in range(10):
        after.step(Seen(80 + 5 * n, 1000, members=frozenset("pt")), play.now + 31.5 + n / 2)
    spent = {name: round(s, 3) for name, s in after.seconds.items() if round(s, 3)}
    assert spent == {"starting": 1.5 + 1.5 + 0.5, "productive": 9.5 + 2.5, "idle": 30.0, "redone": 2.0 - 0.5 + 0.0}
    assert after.began == pytest.approx(0)


def looks() -> st.SearchStrategy[Seen | None]:
    seconds = st.floats(0, 1e6)
    splits = st.dictionaries(st.sampled_from("abc"), st.builds(split, seconds, seconds, seconds))
    return st.none() | st.builds(
        Seen,
        st.integers(0, 50),
        st.none() | st.just(40),
        st.integers(0, 3),
        st.frozensets(st.sampled_from("abcp")),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.sampled_from((False, False, False, True)),
        splits,
        st.dictionaries(st.sampled_from("pq"), seconds),
    )


@given(st.lists(st.tuples(looks(), st.floats(-1000, 1000) | st.just(0.5), st.sampled_from((0, 0, 0, 1, 2)))))
def test_all_seconds_are_given_and_none_twice(course: list[tuple[Seen | None, float, int]]) -> None:
    ledger, now = TimeLedger(1e9), 1e9
    before = dict(ledger.seconds)
    for seen, passed, what in course:
        now += passed
        if what == 1:
            ledger = TimeLedger.load(json.loads(json.dumps(ledger.export())))
            before = dict(ledger.seconds)
        elif what == 2:
            ledger.carry(now)
        else:
            ledger.step(seen, now)
        assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall, abs=1e-3)
        assert all(ledger.seconds[name] >= before[name] - 1e-9 for name in CATEGORIES)
        assert ledger.left() is None or ledger.left() >= 0  # type: ignore[operator]
        assert all(r.seconds >= 0 and r.redone >= 0 for r in ledger.recoveries)
        before = dict(ledger.seconds)


@pytest.mark.parametrize(
    "broken", [{"seconds": {}}, {"recoveries": [[1, 2, 3, 4]]}, {"until": "never"}, {"high": None}]
)
def test_what_is_none_of_its_own_is_told(broken: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        TimeLedger.load(TimeLedger(0.0).export() | broken)


def test_the_pace_is_that_of_the_last_minute() -> None:
    play = begun()
    play.train(60, pace=5)
    play.train(140, pace=1)
    assert play.ledger.pace == pytest.approx(2)
    for _ in range(120):
        play.look()
    assert play.ledger.pace == pytest.approx(1, rel=0.05), "a job that stands still has ever more left"


def test_steps_that_take_longer_than_a_minute_have_a_pace() -> None:
    play = begun()
    for _ in range(3):
        play.train(599, pace=0)
        play.train(1, pace=1)
    assert play.ledger.pace == pytest.approx(1 / 300, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "0 s"), (99, "99 s"), (100, "2 min"), (5900, "98 min"), (6000, "1 h 40 min"), (11100, "3 h 05 min")),
        *((172_800, "2 d 00 h"), (360_000, "4 d 04 h")),
    ],
)
def test_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
