"""What people see of a job: status, events, and the display."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from rich.console import Console

from graphft.errors import GraphftError
from graphft.runtime.coordination import event_log as events_module
from graphft.runtime.coordination import places as places_module
from graphft.runtime.coordination.event_log import Events, read_events
from graphft.runtime.coordination.job_view import read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.places import Places
from graphft.runtime.coordination.queue_counts import count_queue
from graphft.runtime.coordination.records import (
    Committed,
    CoordinatorStatus,
    Event,
    Generation,
    Ordered,
    Registration,
    ShardStatus,
    TrainerStatus,
)
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.status import JobStatus, list_jobs, read_status
from graphft.runtime.etcd import Etcd, EtcdUnreachable
from graphft.runtime.launcher import display as display_module
from graphft.runtime.launcher.display import Display, format_event, format_line, render
from graphft.runtime.protocol.task_groups import TaskCounts
from graphft.transpiler import Job
from tests.support.waiting import until


def fill(etcd: Etcd, keys: Keys, job: Job) -> None:
    """The records of a job in the middle of its second pass."""
    put_job(etcd, keys, job)
    etcd.put(keys.generation, msgspec.json.encode(Generation(3, 0, "", "pserver 1 was restarted")))
    etcd.put(keys.committed, msgspec.json.encode(Committed(2, 1, "step-00000001.g2")))
    etcd.put(keys.pass_, json.dumps({"pass": 1, "chunks": 4, "start_step": 2}).encode())
    for index, version in ((0, 3), (1, 2)):
        etcd.put(keys.pserver(index), msgspec.json.encode(Registration(f"{index}-ps", "tcp://a:1", 10 + index, "host")))
        report = ShardStatus(version, 3, 1.5, 7, {"late": 2})
        etcd.put(keys.status_of("pserver", str(index)), msgspec.json.encode(report))
    for name, loss in (("0-aa", 0.5), ("1-bb", 0.25)):
        etcd.put(keys.trainer(name), msgspec.json.encode(Registration(name, "", 20, "host")))
        etcd.put(keys.status_of("trainer", name), msgspec.json.encode(TrainerStatus(2, 1, loss, 64, 100.0)))
    etcd.put(keys.trainer("2-cc"), msgspec.json.encode(Registration("2-cc", "", 22, "host")))
    for slot, name in ((0, "0-aa"), (1, "1-bb")):
        etcd.put(keys.slot(slot), name.encode())
    for name, chunks in (("todo", (0, 1, 2, 3)), ("pending", (3,)), ("done", ())):
        for chunk in chunks:
            etcd.put(f"{keys.queue(1)}{name}/{chunk}", b"{}")
    etcd.put(f"{keys.queue(0)}todo/9", b"{}")


def test_status_of_a_running_job(etcd: Etcd, keys: Keys, job: Job) -> None:
    fill(etcd, keys, job)
    Events(etcd, keys, "trainer 0").emit("takeover", "trainer 0 took over slot 1", slot=1)
    status = read_status(etcd, keys)
    assert (status.job, status.state, status.generation, status.pass_index) == (keys.job, "running", 3, 1)
    assert status.step == 2, "the lowest version of the shards"
    assert status.checkpoint == 1
    assert {i: (p["version"], p["host"]) for i, p in status.pservers.items()} == {0: (3, "host"), 1: (2, "host")}
    assert list(status.trainers) == ["0-aa", "1-bb", "2-cc"]
    assert status.slots == {0: "0-aa", 1: "1-bb"}
    assert status.queue == {"todo": 3, "pending": 1, "done": 0}
    assert (status.loss, status.samples_per_second) == (0.375, 200.0)
    assert [e.kind for e in status.events] == ["takeover"]
    assert status.spec["trainers"] == 2


def test_a_shard_that_is_restored_does_not_take_the_job_back_to_step_0(etcd: Etcd, keys: Keys, job: Job) -> None:
    """It is registered, and reports version 0 until it has its checkpoint."""
    fill(etcd, keys, job)
    etcd.put(keys.committed, msgspec.json.encode(Committed(3, 3, "step-00000003.g3")))
    etcd.put(keys.status_of("pserver", "1"), msgspec.json.encode(ShardStatus()))
    assert read_status(etcd, keys).step == 3
    etcd.put(keys.generation, msgspec.json.encode(Generation(4, 1, "step-00000001.g2", "the newest one is damaged")))
    assert read_status(etcd, keys).step == 1


def test_json_is_whole_and_plain(etcd: Etcd, keys: Keys, job: Job) -> None:
    fill(etcd, keys, job)
    Events(etcd, keys, "pserver 1").emit("restarted", "pserver 1 is back", step=1, path=Path("a"))
    data = json.loads(read_status(etcd, keys).to_json())
    assert data["job"] == keys.job
    assert data["loss"] == 0.375
    assert data["pservers"]["1"]["counters"] == {"late": 2}
    assert data["events"][0]["fields"] == {"step": 1, "path": "a"}
    assert data["events"][0]["who"] == "pserver 1"


def test_a_job_that_goes_on_is_at_its_step_from_the_first_look_on(etcd: Etcd, keys: Keys, job: Job) -> None:
    """With a new etcd, as a job has that goes on from its storage: it was told to be at step 0 until its first one."""
    put_job(etcd, keys, job)
    assert read_status(etcd, keys, begins=3).step == 3
    etcd.put(keys.generation, msgspec.json.encode(Generation(0, 2, "step-00000002.g0", "")))
    etcd.put(keys.pserver(0), msgspec.json.encode(Registration("0-ps", "tcp://a:1", 10, "host")))
    etcd.put(keys.status_of("pserver", "0"), msgspec.json.encode(ShardStatus(0, 0, 0.0, 0, {})))
    assert read_status(etcd, keys, begins=3).step == 2, "it went back to an older checkpoint: etcd's word counts"
    etcd.put(keys.status_of("pserver", "0"), msgspec.json.encode(ShardStatus(4, 0, 0.0, 0, {})))
    assert read_status(etcd, keys, begins=3).step == 4


def test_status_when_all_processes_are_gone(etcd: Etcd, keys: Keys, job: Job) -> None:
    """A complete job's processes have deregistered: its step is what was committed, not 0."""
    put_job(etcd, keys, job)
    empty = read_status(etcd, keys)
    assert (empty.step, empty.checkpoint, empty.loss, empty.state) == (0, None, None, "running")
    etcd.put(keys.committed, msgspec.json.encode(Committed(0, 4, "step-00000004.g0")))
    etcd.put(keys.state, b"complete")
    status = read_status(etcd, keys)
    assert (status.step, status.state) == (4, "complete")
    assert "step 4/4" in format_line(status)


def test_a_job_without_fault_tolerance_has_no_queue(etcd: Etcd, keys: Keys, job: Job) -> None:
    put_job(etcd, keys, Job.make(job.source, job.config.replace(ft=False, name=keys.job)))
    for name, pass_index in (("0-aa", 2), ("1-bb", 1)):
        etcd.put(keys.trainer(name), msgspec.json.encode(Registration(name, "", 20, "host")))
        etcd.put(keys.status_of("trainer", name), msgspec.json.encode(TrainerStatus(5, pass_index)))
    status = read_status(etcd, keys)
    assert (status.queue, status.pass_index) == ({}, 1), "the pass is the slowest trainer's"
    assert format_line(status).endswith("2 trainers  0/2 pservers  (no fault tolerance)")


def coordinate(etcd: Etcd, keys: Keys, job: Job) -> None:
    """The job of `fill`, with two coordinators: the second one serves."""
    fill(etcd, keys, job)
    for name, serving in (("0-aa", False), ("1-bb", True)):
        etcd.put(keys.coordinator(name), msgspec.json.encode(Registration(name, "tcp://a:7", 30, "host")))
        report = CoordinatorStatus(serving, 1234.5, 20.0, 1, {"tasks": 7})
        etcd.put(keys.status_of("coordinator", name), msgspec.json.encode(report))
    etcd.put(keys.coordinator_addr, msgspec.json.encode(Registration("1-bb", "tcp://a:7", 30, "host")))
    etcd.put(keys.task_counts, msgspec.json.encode({1: TaskCounts(5, 6, 7)}))


def shown(status: JobStatus) -> str:
    text = io.StringIO()
    Console(file=text, width=120).print(render(status))
    return text.getvalue()


def test_who_gives_out_the_tasks(etcd: Etcd, keys: Keys, coordinated: Job) -> None:
    coordinate(etcd, keys, coordinated)
    status = read_status(etcd, keys)
    assert {n: (c["serving"], c["pid"], c["counters"]) for n, c in status.coordinators.items()} == {
        "0-aa": (False, 30, {"tasks": 7}),
        "1-bb": (True, 30, {"tasks": 7}),
    }
    assert status.queue == {"todo": 5, "pending": 6, "done": 7}, "what the coordinator says, and no records of claims"
    assert (status.waiting, status.told) == ("", "running")
    assert "2/2 pservers  1 coordinator (1 standing by)  chunks 5 todo 6 pending 7 done" in format_line(status)
    rows = [line.split() for line in shown(status).splitlines() if line.startswith("coordinator")]
    assert [row[:2] + row[3:] for row in rows] == [
        ["coordinator", "0-aa", "standing", "by"],
        ["coordinator", "1-bb", "serving", "1,234", "tasks/s"],
    ]
    data = json.loads(status.to_json())
    assert data["coordinators"]["1-bb"]["tasks_per_second"] == 1234.5
    assert (data["waiting"], data["spec"]["dispatch"]) == ("", "coordinator")


@pytest.mark.parametrize(("rate", "told"), [(0.0, "0"), (0.24, "0.2"), (3.16, "3.2"), (9.96, "10"), (12.5, "12")])
def test_a_few_tasks_per_second_are_not_none(etcd: Etcd, keys: Keys, coordinated: Job, rate: float, told: str) -> None:
    """Of a sync job, whose slots ask for a handful of tasks in a pass."""
    coordinate(etcd, keys, coordinated)
    report = CoordinatorStatus(True, rate)
    etcd.put(keys.status_of("coordinator", "1-bb"), msgspec.json.encode(report))
    assert f" {told} tasks/s" in shown(read_status(etcd, keys))


def test_a_job_waits_for_a_coordinator_that_serves(etcd: Etcd, keys: Keys, coordinated: Job) -> None:
    """What a process reports of itself may be old: trainers go by the address."""
    coordinate(etcd, keys, coordinated)
    etcd.delete(keys.coordinator_addr)
    status = read_status(etcd, keys)
    assert status.waiting == "a coordinator"
    assert "WAITING for a coordinator (2 standing by)" in format_line(status)
    etcd.delete_prefix(keys.coordinators)
    etcd.delete(keys.task_counts)
    line = format_line(read_status(etcd, keys))
    assert "WAITING for a coordinator  chunks not counted" in line
    etcd.put(keys.state, b"complete")
    assert read_status(etcd, keys).waiting == ""


def test_a_coordinator_alone_works_on_nothing(etcd: Etcd, keys: Keys, coordinated: Job) -> None:
    coordinate(etcd, keys, coordinated)
    for prefix in (keys.pservers, keys.trainers):
        etcd.delete_prefix(prefix)
    status = read_status(etcd, keys)
    assert (status.idle, status.waiting, status.told) == (True, "", "running, but only a coordinator is there")


def test_a_pass_that_the_coordinator_has_dropped_is_done(etcd: Etcd, keys: Keys) -> None:
    etcd.put(keys.task_counts, msgspec.json.encode({3: TaskCounts(1, 2, 3)}))
    assert count_queue(etcd, keys, "coordinator", 3, 6) == TaskCounts(1, 2, 3)
    assert count_queue(etcd, keys, "coordinator", 2, 6) == TaskCounts(0, 0, 6)


def test_unknown_job(etcd: Etcd, keys: Keys, job: Job) -> None:
    put_job(etcd, keys, job)
    with pytest.raises(GraphftError, match="no job named nosuch") as caught:
        read_status(etcd, Keys("nosuch"))
    assert keys.job in caught.value.help


def test_jobs_are_listed_by_their_spec_alone(etcd: Etcd, keys: Keys, job: Job) -> None:
    other = Keys(f"{keys.job}-other")
    put_job(etcd, keys, job)
    put_job(etcd, other, job)
    foreign = [f"/{keys.job}/deeper/spec", f"/{keys.job}.status/spec", f"/{keys.job}x/inspec", f"/{keys.job}y/spec/z"]
    for key in foreign:
        etcd.put(key, b"")
    mine = [name for name in list_jobs(etcd) if name.startswith(keys.job)]
    assert mine == sorted([keys.job, other.job])


def test_a_look_does_not_wait_long_for_etcd() -> None:
    with Etcd(["127.0.0.1:1"]) as etcd, pytest.raises(EtcdUnreachable):
        read_status(etcd, Keys("job"), deadline=0.2)


def test_put_job_refuses_another_run_of_the_same_name(etcd: Etcd, keys: Keys, job: Job) -> None:
    put_job(etcd, keys, job)
    put_job(etcd, keys, job)
    other = Job.make(job.source, job.config.replace(seed=1))
    with pytest.raises(GraphftError, match=r"another run named.*differs in program or options"):
        put_job(etcd, keys, other)


def test_the_panel_tells_how_stale_the_gradients_are(etcd: Etcd, keys: Keys, job: Job) -> None:
    fill(etcd, keys, job)
    report = ShardStatus(9, 0, 1.5, 9, {}, [6, 2, 0, 1], 5 / 9, 3)
    etcd.put(keys.status_of("pserver", "1"), msgspec.json.encode(report))
    status = read_status(etcd, keys)
    assert status.pservers[1]["staleness"] == [6, 2, 0, 1]
    text = io.StringIO()
    Console(file=text, width=120).print(render(status))
    assert text.getvalue().count("staleness") == 1, "none where nothing is counted"
    assert "staleness 0.6, at most 3" in text.getvalue()


def test_view(etcd: Etcd, keys: Keys, job: Job) -> None:
    assert not read_view(keys, ()).over
    fill(etcd, keys, job)
    lease, _ = etcd.lease_grant(30)
    etcd.put(keys.pserver(1), msgspec.json.encode(Registration("1-new", "tcp://b:2", 7, "host")), lease)
    view = read_view(keys, etcd.range(keys.control).kvs)
    assert {i: r.id for i, r in view.pservers.items()} == {0: "0-ps", 1: "1-new"}
    assert sorted(view.trainers) == ["0-aa", "1-bb", "2-cc"]
    assert (view.leases["1-new"], view.leases["0-ps"]) == (lease, 0)
    assert view.slots == {0: "0-aa", 1: "1-bb"}
    assert view.generation is not None
    assert (view.generation.number, view.committed) == (3, Committed(2, 1, "step-00000001.g2"))
    assert (view.state, view.over) == ("running", False)
    etcd.lease_revoke(lease)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a" * 65, "..", "jöb", "a\n"])
def test_job_names(name: str) -> None:
    with pytest.raises(GraphftError, match="cannot be named"):
        Keys(name)


# -- events -----------------------------------------------------------------------------------------------------------


def test_events_are_kept_in_order_and_bounded(etcd: Etcd, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "KEEP", 5)
    for life in range(8):  # a process that dies young each time
        events = Events(etcd, keys, "trainer 0")
        events.emit("died", f"life {life}")
        events.emit("died", f"life {life} again")
    kept = [event.text for _, event in read_events(etcd, keys)]
    assert len(kept) <= 7
    assert kept == [f"life {n}{again}" for n in range(8) for again in ("", " again")][-len(kept) :]


def test_an_event_that_etcd_does_not_take_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with Etcd(["127.0.0.1:1"]) as etcd, caplog.at_level("INFO", logger="graphft"):
        Events(etcd, Keys("job"), "trainer 0").emit("takeover", "took over slot 2")
    assert "took over slot 2" in caplog.text
    assert "event not recorded in etcd" in caplog.text


# -- display ----------------------------------------------------------------------------------------------------------


def status_of(*events: Event, **changes: object) -> JobStatus:
    spec = {"program": "p", "trainers": 2, "pservers": 2, "sync": True, "ft": True, "passes": 3, "total_steps": 12}
    values = {
        "job": "tiny",
        "state": "running",
        "spec": spec,
        "generation": 1,
        "pass_index": 1,
        "step": 7,
        "checkpoint": 5,
        "events": list(events),
        "queue": {"todo": 2, "pending": 1, "done": 1},
    }
    return JobStatus(**{**values, **changes})  # type: ignore[arg-type]


def event(at: float, text: str, who: str = "pserver 0") -> Event:
    return Event(at, who, "kind", text)


def test_line() -> None:
    trainers = {
        "0-aa": {"loss": 0.12345, "samples_per_second": 1234.0, "metrics": {"accuracy": 0.5}},
        "1-bb": {"metrics": {"accuracy": 0.75, "f1": None}},
    }
    line = format_line(status_of(trainers=trainers, pservers={0: {"version": 7}}, slots={0: "0-aa", 1: "1-bb"}))
    assert line == (
        "pass 2/3  step 7/12  loss 0.1235  accuracy 0.625  1,234 samples/s  "
        "2 trainers  1/2 pservers  chunks 2 todo 1 pending 1 done"
    )
    waiting = format_line(status_of(trainers=trainers, slots={1: "1-bb"}))
    assert "2 trainers  0/2 pservers  1 of 2 slots wait for a trainer  chunks" in waiting
    failed = {"todo": 0, "pending": 0, "done": 3}
    assert format_line(status_of(queue=failed)).endswith(
        "loss -  0 samples/s  0 trainers  0/2 pservers  chunks 0 todo 0 pending 3 done"
    )


def test_display_without_a_terminal_prints_each_event_once() -> None:
    stream = io.StringIO()
    display = Display(stream, since=0.0)
    first, second = event(1.0, "took over slot 2"), event(2.0, "died [/b] [red]:warning: 100%")
    display.show(status_of(first))
    display.show(status_of(first, second, step=8))
    display.show(status_of(first, second, step=9))
    display.close(status_of(first, second, event(3.0, "done"), step=12, state="complete"))
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines if "[pserver 0]" in line] == [
        "[pserver 0] took over slot 2",
        "[pserver 0] died [/b] [red]:warning: 100%",
        "[pserver 0] done",
    ]
    assert [line.split("step ")[1][:5] for line in lines if line.startswith("pass ")] == ["7/12 "], (
        "a line at once, then each five seconds; none of a complete job, whose roles have left"
    )


def test_events_of_launches_before_are_not_told_again() -> None:
    """Found by a user: "trainer 1 died", of a launcher that was killed long ago, right after "resuming"."""
    stream = io.StringIO()
    display = Display(stream, since=10.0)
    old, mine, skewed = event(9.0, "died"), event(10.5, "registered"), event(8.0, "of a machine whose clock is late")
    display.show(status_of(old, mine))
    display.show(status_of(old, mine, skewed, step=8))
    display.close(status_of(old, mine, skewed, step=12, state="complete"))
    texts = [line.split("[pserver 0] ")[1] for line in stream.getvalue().splitlines() if "[pserver 0]" in line]
    assert texts == ["registered", "of a machine whose clock is late"]


def test_the_panel_shows_roles_slots_and_events() -> None:
    status = status_of(
        event(1.0, "trainer 1 died [/], slot 1 taken over", "launcher"),
        slots={0: "0-aa", 1: "0-aa"},
        pservers={0: {"host": "h", "pid": 4, "version": 7}, 1: {"host": "h", "pid": 5}},
        trainers={"0-aa": {"host": "h", "pid": 6, "step": 7, "samples_per_second": 10.0}},
    )
    stream = io.StringIO()
    Console(file=stream, width=120, highlight=False, markup=False).print(render(status))
    text = stream.getvalue()
    for wanted in (
        "graphft job tiny: running, generation 1",
        "pserver 0",
        "h:4",
        "version 7",
        "version -",
        "trainer 0-aa",
        "0, 1",
        "10 samples/s",
        "[launcher] trainer 1 died [/], slot 1 taken over",
    ):
        assert wanted in text, text
    stream = io.StringIO()
    Console(file=stream, width=80, highlight=False, markup=False).print(render(status))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert "role          process  at         slots  doing" in lines, "the table begins on a line of its own"
    assert len(lines) == len(text.splitlines()), "80 columns are enough"


def drawn(status: JobStatus, width: int, left: float | None = None) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, markup=False).print(render(status, left))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


BUSY: dict[str, Any] = {
    "slots": {0: "0-aa", 1: "1-bb"},
    "pservers": {
        0: {
            "host": "h",
            "pid": 4,
            "version": 7,
            "learning_rates": {"lr": 0.125, "lr_1": 1e-05},
            "checkpoint_age": 12.4,
        },
        1: {"host": "h", "pid": 5, "version": 7, "learning_rates": {"lr": 0.125}, "checkpoint_age": 13.0},
    },
    "trainers": {
        "0-aa": {
            "host": "h",
            "pid": 6,
            "step": 7,
            "loss": 0.5,
            "metrics": dict.fromkeys(("acc", "f1", "auc", "map"), 0.5),
        },
        "1-bb": {"host": "h", "pid": 7, "step": 7, "loss": 0.5, "learning_rates": {}},
    },
}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_tells_all_at_any_width(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = status_of().spec | {"folder": str(tmp_path / "jobs" / "tiny")}
    lines = drawn(status_of(event(1.0, "took over slot 2"), spec=spec, **BUSY), width, 754.0)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for wanted in (
        *("step 7/12", "13 min left", "acc 0.5 f1 0.5 auc 0.5 map 0.5", "lr 0.125, lr_1 1e-05"),
        *("checkpoint at step 5, 12 s ago", "folder jobs/tiny", "2 trainers 2/2 pservers", "chunks 2 todo"),
        *("pserver 1 h:5 version 7", "trainer 1-bb h:7 step 7 1 0 samples/s", "took over slot 2"),
        *(("role process at slots doing",) if width > 40 else ()),
    ):
        assert wanted in text, text


def test_what_the_panel_does_not_know() -> None:
    text = "\n".join(drawn(status_of(checkpoint=None), 120))
    assert "lr -  no checkpoint so far" in text
    assert " left" not in text
    assert "folder" not in text
    without = status_of(spec=status_of().spec | {"ft": False, "folder": "/elsewhere/a"})
    assert "lr -  folder /elsewhere/a" in "\n".join(drawn(without, 120))
    assert status_of(pservers={0: {"checkpoint_age": 3.0}, 1: {"checkpoint_age": 90.0}}).checkpoint_age == 3.0
    behind = status_of(
        spec=status_of().spec | {"sync": False}, pservers={0: {"checkpoint_age": 3.0}, 1: {"checkpoint_age": 90.0}}
    )
    assert behind.checkpoint_age == 90.0, "async: each shard has its own"


def test_lines_tell_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    display = Display(stream, since=0.0)
    on_demand = status_of().spec | {"on_demand": True}
    for step, changes in ((2, {}), (4, {}), (3, {}), (6, {}), (8, {"state": "failed"}), (9, {"spec": on_demand})):
        display.show(status_of(step=step, **changes))
        now[0] += 10.0
    lines = [line.split("samples/s  ")[1] for line in stream.getvalue().splitlines()]
    found = [line.split(" left")[0] if " left" in line else "" for line in lines]
    assert found == ["", "40 s", "", "", "", ""], "not while it repeats steps, nor of a job that is over or on demand"


SHOWS = """
import sys, time
from tests.runtime.test_status import BUSY, status_of
from graphft.runtime.launcher.display import Display
display = Display()
for line in sys.stdin:
    display.show(status_of(step=int(line), **BUSY))
display.close(status_of(step=12, state="complete"))
"""


def test_a_panel_survives_a_resize() -> None:
    """On a terminal that becomes narrower while it is shown: what was drawn is gone, and no line is too long."""
    master, slave = os.openpty()
    resize(slave, 120)
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", SHOWS], stdin=subprocess.PIPE, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    output = bytearray()
    Thread(target=read_all, args=(master, output), daemon=True).start()
    try:
        feed(process, 7)
        until(lambda: b"step 7/12" in output)
        wide = frame(output)
        assert max(map(len, wide)) > 60
        resize(master, 50)
        feed(process, 8)
        until(lambda: b"step 8/12" in output)
        narrow, cleared = frame(output.rpartition(b"\x1b[2J\x1b[H")[2]), len(output)
        assert b"\x1b[2J\x1b[H" in output
        assert "graphft job tiny: running, generation 1" in narrow[0]
        assert max(map(len, narrow)) <= 50
        feed(process, 9)
        until(lambda: b"step 9/12" in output)
        assert b"\x1b[2J" not in output[cleared:], "it is drawn over, as long as the terminal stays as it is"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))


def read_all(terminal: int, output: bytearray) -> None:
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(terminal, 4096):
            output += piece


def feed(process: subprocess.Popen[bytes], step: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{step}\n".encode())
    process.stdin.flush()


def frame(output: bytes | bytearray) -> list[str]:
    """The lines of what was drawn, without colours and moves of the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    return [line.strip("\r") for line in text.split("\n")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_display_on_a_terminal_shows_a_panel_and_leaves_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = Display(stream, since=0.0)
    for step in (7, 8):
        display.show(status_of(event(1.0, "took over slot 2"), step=step))
    display.close(status_of(event(1.0, "took over slot 2"), step=12))
    panel, left = stream.getvalue().rsplit("\x1b[?25h", 1)  # the cursor is shown again
    assert "graphft job tiny" in panel
    assert "took over slot 2" in left
    assert "step 12/12" in left


def test_event_text() -> None:
    assert format_event(event(0.0, "back")).endswith(" [pserver 0] back")


def test_where_processes_are_and_what_they_wait_for(etcd: Etcd, keys: Keys, job: Job) -> None:
    """As their launcher tells; a process is found by its role, index and pid."""
    fill(etcd, keys, job)
    etcd.put(keys.trainer("2-cc"), msgspec.json.encode(Registration("2-cc", "", 22, "host")))
    lacks = "waiting for {GPU: 1}: no node of this Ray has GPU: 1, the largest has GPU: 0"
    places = Places(etcd, keys)
    places.tell(
        [
            Ordered("pserver", 1, "node 3f2a", 11),
            Ordered("trainer", 2, "node 77ab", 22),
            Ordered("trainer", 0, "node 99cd", 19),  # the process before the one that is registered
            Ordered("trainer", 3, lacks, 0),
            Ordered("trainer", 4, lacks, 0),
        ]
    )
    status = read_status(etcd, keys)
    assert status.without_room == {lacks: ["trainer 3", "trainer 4"]}
    assert len(json.loads(status.to_json())["places"]) == 5
    panel = shown(status)
    assert "host:11 node 3f2a " in panel
    assert "host:22 node 77ab " in panel
    assert "host:20 " in panel
    assert "node 99cd" not in panel
    assert f"trainer 3, trainer 4: {lacks}" in panel
    assert "2 wait for room" in format_line(status)


def test_what_a_launcher_tells_of_places_ends_with_it_and_comes_back_with_another_etcd(
    etcd: Etcd, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places_module, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(places_module, "RENEW_SECONDS", 0.0)
    places, found = Places(etcd, keys), [Ordered("trainer", 0, "waiting for {CPU: 1}", 0)]
    places.tell([])
    assert etcd.count(keys.places) == 0
    places.tell(found)
    (kv,) = etcd.range(keys.places).kvs
    assert kv.lease
    etcd.lease_revoke(kv.lease)
    assert etcd.count(keys.places) == 0
    places.tell(found)  # finds that it is lost
    places.tell(found)
    (kv,) = etcd.range(keys.places).kvs
    assert msgspec.json.decode(kv.value, type=list[Ordered]) == found
    places.tell([])
    assert [msgspec.json.decode(kv.value) for kv in etcd.range(keys.places).kvs] == [[]]
