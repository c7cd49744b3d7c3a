"""When a job counts as recovered from a fault, told as stories of what its shards answer."""

from __future__ import annotations

import pytest

from graphft.runtime.chaos.probe import Answer
from graphft.runtime.chaos.recovery import Recoveries, Recovery
from graphft.runtime.chaos.report import summaries
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.records import Generation


class Job:
    """Two shards that answer at the times given."""

    def __init__(self) -> None:
        self.recoveries = Recoveries(shards=2, total_steps=100)
        self.answers: dict[int, Answer] = {}
        self.generation = Generation()
        self.shard_generations: dict[int, Generation] = {}

    def answer(self, now: float, *versions: int, generation: int = 0, names: str = "ab") -> list[Recovery]:
        self.answers = {i: Answer(names[i], generation, v, now) for i, v in enumerate(versions)}
        return self.update(now)

    def update(self, now: float) -> list[Recovery]:
        return self.recoveries.update(
            self.answers, JobView(generation=self.generation, shard_generations=self.shard_generations), now
        )

    def begin(self, kind: str, at: float, gone: str = "", alone: bool = True) -> Recovery:
        return self.recoveries.begin(kind, "", at, alone, frozenset(gone))


@pytest.fixture
def job() -> Job:
    job = Job()
    job.answer(0.0, 10, 10)
    return job


def test_the_step_in_flight_does_not_count(job: Job) -> None:
    fault = job.begin("kill-trainer", 1.0)
    assert not job.answer(1.1, 10, 11), "what was known first after the fault"
    assert not job.answer(1.2, 11, 11)
    assert not job.answer(1.3, 12, 12)
    assert job.answer(1.5, 12, 13) == [fault]
    assert fault.seconds == pytest.approx(0.5)
    assert not job.recoveries.open


def test_answers_from_before_the_fault_do_not_count(job: Job) -> None:
    fault = job.begin("kill-trainer", 1.0)
    job.answers = {0: Answer("a", 0, 50, 1.1), 1: Answer("b", 0, 50, 0.9)}
    assert not job.update(1.1)
    assert not fault.base


def test_a_fault_that_is_hit_by_another_tells_nothing_of_itself(job: Job) -> None:
    job.begin("kill-trainer", 1.0)
    assert not job.answer(1.1, 10, 10)
    assert job.answer(1.3, 12, 12)
    hit, second = job.begin("kill-trainer", 2.0), job.begin("kill-pserver", 2.1, alone=False)
    assert [r.alone for r in (job.recoveries.all[0], hit, second)] == [True, False, False]


def test_a_rollback_counts_from_the_step_that_it_returns_to(job: Job) -> None:
    fault = job.begin("kill-pserver", 1.0, gone="b")
    assert not job.answer(1.1, 14, 14), "its answers were on their way when it died"
    job.generation = Generation(1, 5)
    assert not job.answer(1.2, 5, 14, generation=0)
    assert not job.answer(1.3, 5, 5, generation=1, names="ac")
    assert job.answer(1.4, 7, 7, generation=1, names="ac") == [fault]
    assert job.recoveries.repeated == 9
    assert job.recoveries.low == 7


def test_a_shard_that_was_killed_must_be_replaced(job: Job) -> None:
    job.begin("kill-pserver", 1.0, gone="b")
    job.generation = Generation(1, 5)  # of an earlier fault
    assert not job.answer(1.1, 7, 7, generation=1), "still the one that was killed"
    job.generation = Generation(2, 5)
    assert not job.answer(1.5, 5, 5, generation=2, names="ac")
    assert job.answer(1.6, 7, 7, generation=2, names="ac")


def test_one_missing_shard_is_no_progress(job: Job) -> None:
    fault = job.begin("kill-pserver", 1.0, gone="b")
    assert not job.answer(1.1, 40)
    assert fault.seconds is None
    assert job.recoveries.progress_at == 0.0


def test_the_end_of_the_job_ends_all_recoveries(job: Job) -> None:
    fault = job.begin("kill-trainer", 1.0)
    assert job.answer(1.2, 100, 100) == [fault]
    late = job.begin("kill-trainer", 2.0)
    job.recoveries.finish(2.5)
    assert late.seconds == 0.5


def test_progress(job: Job) -> None:
    job.answer(3.0, 11, 10)
    assert job.recoveries.progress_at == 0.0
    job.answer(4.0, 11, 11)
    assert job.recoveries.progress_at == 4.0
    job.generation = Generation(1, 5)
    job.answer(5.0, 11, 11)
    assert job.recoveries.progress_at == 5.0


def test_async_shards_go_on_each_for_itself() -> None:
    job = Job()
    job.shard_generations = {0: Generation(0, 0), 1: Generation(0, 0)}
    job.answer(0.0, 40, 30)
    fault = job.begin("kill-pserver", 1.0, gone="b")
    assert not job.answer(1.1, 45, 30), "the dead one's last words"
    job.shard_generations[1] = Generation(1, 25)
    job.answers = {0: Answer("a", 0, 60, 1.2), 1: Answer("c", 1, 25, 1.2)}
    assert not job.update(1.2)
    job.answers[1] = Answer("c", 1, 27, 1.3)
    assert not job.update(1.3), "the other has stopped"
    job.answers[0] = Answer("a", 0, 62, 1.4)
    assert job.update(1.4) == [fault]
    assert (job.recoveries.repeated, job.recoveries.low, job.recoveries.generation) == (5, 27, 1)


def test_summaries() -> None:
    def recovery(kind: str, seconds: float | None, alone: bool = True) -> Recovery:
        return Recovery(kind, "", 0.0, 0, 0, alone, seconds=seconds)

    found = summaries(
        [recovery("x", s / 10) for s in range(1, 21)]
        + [recovery("y", 3.0), recovery("y", 9.0, False), recovery("y", None)]
    )
    assert found["x"] == {"count": 20, "median": 1.05, "p95": 1.9, "worst": 2.0}
    assert found["y"] == {"count": 1, "median": 3.0, "p95": 3.0, "worst": 3.0}
    assert found["during a recovery"]["worst"] == 9.0
    assert found["all (alone)"]["count"] == 21
