"""What is counted of coordinators that are killed, and of trainers that end though no fault befell them."""

from __future__ import annotations

import uuid
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

import graphft
from graphft.errors import GraphftError
from graphft.runtime.chaos.compare import Chunks, count_chunks
from graphft.runtime.chaos.coordinators import NONE_STOOD_BY, STOOD_BY, Coordinators, TrainerEnds
from graphft.runtime.chaos.fault_schedule import COORDINATOR_WEIGHTS, MESSAGES, WEIGHTS, kinds_of, make_schedule
from graphft.runtime.chaos.report import Report
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.process_ends import note_end
from graphft.runtime.protocol.task_groups import TaskCounts
from tests.support.programs_by_hand import linear


def view(serving: str, *others: str) -> JobView:
    records = {name: Registration(name, "tcp://a:1", 1, "h") for name in (serving, *others) if name}
    return JobView(coordinators=records, coordinator=records.get(serving))


def test_a_take_over_ends_when_another_one_serves() -> None:
    found = Coordinators()
    found.hurt("kill-coordinator", ["a"], view("a", "b"), 1.0, True)
    for seen in (view("a", "b"), view("", "b"), view("")):
        found.look(seen, 1.1)
    assert found.seconds == {}
    found.look(view("b"), 1.25)
    found.look(view("b", "c"), 9.0)
    assert found.seconds == {STOOD_BY: [0.25]}
    assert (found.killed, found.served, found.stopped) == (1, 1, 0)


def test_only_the_death_of_the_one_that_serves_begins_a_take_over() -> None:
    found = Coordinators()
    found.hurt("kill-coordinator", ["b"], view("a", "b"), 1.0, False)
    found.hurt("freeze-coordinator", ["a"], view("a", "b"), 2.0, True)
    found.look(view("c"), 3.0)
    assert (found.killed, found.served, found.stopped, found.seconds) == (1, 0, 1, {})


def test_a_take_over_that_is_hit_goes_on_and_one_that_the_whole_job_is_killed_in_does_not_count() -> None:
    found = Coordinators()
    found.hurt("kill-coordinator", ["a"], view("a", "b"), 1.0, True)
    found.hurt("kill-coordinators", ["b"], view("b"), 1.5, False)
    found.look(view("b"), 1.6)
    found.look(view("c"), 3.0)
    assert found.seconds == {STOOD_BY: [2.0]}
    found.hurt("kill-coordinators", ["c", "d"], view("c", "d"), 4.0, False)
    found.forget()
    found.look(view("e"), 9.0)
    assert (found.killed, found.served, found.seconds) == (4, 3, {STOOD_BY: [2.0]})


def test_a_take_over_where_none_stood_by_is_told_apart() -> None:
    found = Coordinators()
    found.hurt("kill-coordinators", ["a", "b"], view("a", "b"), 1.0, False)
    found.look(view("c"), 2.0)
    assert found.seconds == {NONE_STOOD_BY: [1.0]}


def test_trainers_that_end_by_themselves(tmp_path: Path) -> None:
    ends = TrainerEnds()
    ends.hurt("kill-trainers", ["0-a", "1-b"])
    ends.hurt("kill-coordinators", ["0-c", "1-d"])
    ends.hurt("pause-trainer", ["1-b"])
    for name in ("trainer 0", "trainer 1", "coordinator 0", "pserver 1"):
        note_end(tmp_path, name, "preemption", "killed by SIGKILL")
    assert ends.unasked(tmp_path) == 0
    note_end(tmp_path, "trainer 1", "preemption", "lease or etcd lost")
    note_end(tmp_path, "trainer 0", "failure", "exit status 1")
    note_end(tmp_path, "coordinator 0", "failure", "exit status 1")
    assert ends.unasked(tmp_path) == 2
    ends.hurt("freeze-etcd", [])
    assert ends.unasked(tmp_path) == 1, "a failure is nobody's wish"


def test_only_a_job_with_coordinators_loses_them() -> None:
    assert set(kinds_of((), 1, coordinator=True)) == {*WEIGHTS, *COORDINATOR_WEIGHTS, *MESSAGES}
    with pytest.raises(GraphftError, match="no kind of fault 'kill-coordinator'"):
        kinds_of(("kill-coordinator",), 1)
    kinds = kinds_of((*COORDINATOR_WEIGHTS, "kill-etcd"), 1, coordinator=True)
    assert {f.kind for f in make_schedule(3, 40, kinds, 1000, 10)} == {*kinds}


def test_the_report_tells_of_coordinators() -> None:
    coordinators = Coordinators(7, 5, 2, {STOOD_BY: [0.25, 0.5, 0.125]})
    chunks = Chunks(8, 8, 0, 0, 0)
    report = Report("j", 0, 1, 9, 0, completed=True, identical=True, chunks=chunks, coordinators=coordinators)
    assert report.ok
    console = Console(record=True, width=120)
    console.print(report.render())
    shown = console.export_text()
    assert "coordinators   7 killed, 5 of them while they served; 2 stopped" in shown
    assert "take-over      median s 0.25 (worst 0.50) 3 times where one stood by" in shown
    assert "trainers       0 ended that no fault had befallen" in shown
    figures = report.to_json()["coordinators"]
    assert (figures["killed"], figures["take_over_seconds"][STOOD_BY]["count"]) == (7, 3)
    report.trainers_ended = 1
    assert not report.ok, "a trainer died of it"


def test_the_tasks_of_a_coordinator_are_counted(etcd: Etcd, tmp_path: Path) -> None:
    """Of the passes that it has dropped, all are done; without any word of it, none."""
    keys, data = (
        Keys(f"job-{uuid.uuid4().hex}"),
        graphft.arrays(chunk_size=8, x=torch.zeros(32, 8), y=torch.zeros(32, 1)),
    )
    options = {"chunks": data, "batch_size": 4, "passes": 3, "name": keys.job}
    job = graphft.transpile(linear(features=8), ft=True, dispatch="coordinator", **options)
    assert count_chunks(job, etcd, tmp_path, 24) == Chunks(expected=8, done=0, left_out=0, todo=8, pending=0)
    etcd.put(keys.task_counts, msgspec.json.encode({2: TaskCounts(1, 1, 2)}))
    assert count_chunks(job, etcd, tmp_path, 24) == Chunks(expected=8, done=6, left_out=0, todo=1, pending=1)
    etcd.delete_prefix(f"/{keys.job}")


def test_of_a_job_that_stopped_early_the_passes_that_are_over_count(etcd: Etcd, tmp_path: Path) -> None:
    """Its last one is cut off in the middle: nobody is to do the rest of it."""
    keys = Keys(f"job-{uuid.uuid4().hex}")
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 8), y=torch.zeros(32, 1))
    job = graphft.transpile(linear(features=8), ft=True, chunks=data, batch_size=4, passes=6, name=keys.job)
    for steps, expected in ((48, 8), (20, 4), (6, 0)):
        assert count_chunks(job, etcd, tmp_path, steps).expected == expected
    etcd.delete_prefix(f"/{keys.job}")
