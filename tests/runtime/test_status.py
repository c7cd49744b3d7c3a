"""People see a job's status, its events, and where its processes are."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from graphft.errors import GraphftError
from graphft.runtime.coordination import event_log as events_module
from graphft.runtime.coordination.event_log import Events, ProcessLocations, read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import (
    Committed,
    CoordinatorStatus,
    Generation,
    Ordered,
    Registration,
    ShardStatus,
    TrainerStatus,
)
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.status import JobStatus, count_queue, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.display import format_line, render
from graphft.runtime.protocol.task_pass import TaskCounts
from graphft.transpiler.job import Job


def fill(etcd: Etcd, keys: Keys, job: Job) -> None:
    """The records of a job in the middle of its second pass."""
    put_job(etcd, keys, job)
    etcd.put(keys.generation, msgspec.json.encode(Generation(3, 0, "", "pserver 1 was restarted")))
    etcd.put(keys.committed, msgspec.json.encode(Committed(2, 1, "step-00000001.g2")))
    etcd.put(keys.pass_, json.dumps({"pass": 1, "chunks": 4, "start_step": 2}).encode())
    for index, version in ((0, 3), (1, 2)):
        etcd.put(keys.pserver(index), msgspec.json.encode(Registration(f"{index}-ps", "tcp://a:1", 10 + index, "host")))
        report = ShardStatus(version, 3, 1.5, 7, {"late": 2}, metrics={"loss": 0.375} if index == 0 else {})
        etcd.put(keys.status_of("pserver", str(index)), msgspec.json.encode(report))
    for name in ("0-aa", "1-bb"):
        etcd.put(keys.trainer(name), msgspec.json.encode(Registration(name, "", 20, "host")))
        etcd.put(keys.status_of("trainer", name), msgspec.json.encode(TrainerStatus(2, 1, 64, 100.0)))
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
    fill(etcd, keys, job)
    etcd.put(keys.committed, msgspec.json.encode(Committed(3, 3, "step-00000003.g3")))
    etcd.put(keys.status_of("pserver", "1"), msgspec.json.encode(ShardStatus()))
    assert read_status(etcd, keys).step == 3
    etcd.put(keys.generation, msgspec.json.encode(Generation(4, 1, "step-00000001.g2", "the newest one is damaged")))
    assert read_status(etcd, keys).step == 1


def test_a_job_that_goes_on_is_at_its_step_from_the_first_look_on(etcd: Etcd, keys: Keys, job: Job) -> None:
    put_job(etcd, keys, job)
    assert read_status(etcd, keys, begins=3).step == 3
    etcd.put(keys.generation, msgspec.json.encode(Generation(0, 2, "step-00000002.g0", "")))
    etcd.put(keys.pserver(0), msgspec.json.encode(Registration("0-ps", "tcp://a:1", 10, "host")))
    etcd.put(keys.status_of("pserver", "0"), msgspec.json.encode(ShardStatus(0, 0, 0.0, 0, {})))
    assert read_status(etcd, keys, begins=3).step == 2, "it went back to an older checkpoint: etcd's word counts"
    etcd.put(keys.status_of("pserver", "0"), msgspec.json.encode(ShardStatus(4, 0, 0.0, 0, {})))
    assert read_status(etcd, keys, begins=3).step == 4


def coordinate(etcd: Etcd, keys: Keys, job: Job) -> None:
    """The job of `fill`, with two coordinators: the second one serves."""
    fill(etcd, keys, job)
    for name, serving in (("0-aa", False), ("1-bb", True)):
        etcd.put(keys.coordinator(name), msgspec.json.encode(Registration(name, "tcp://a:7", 30, "host")))
        report = CoordinatorStatus(serving, 1, {"tasks": 7})
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
    assert "2/2 pservers  2 coordinators  chunks 5 todo 6 pending 7 done" in format_line(status)
    rows = [line.split() for line in shown(status).splitlines() if line.startswith("coordinator")]
    assert [row[:2] + row[3:] for row in rows] == [
        ["coordinator", "0-aa", "standing", "by"],
        ["coordinator", "1-bb", "serving"],
    ]
    data = json.loads(status.to_json())
    assert (data["waiting"], data["spec"]["dispatch"]) == ("", "coordinator")


def test_a_job_waits_for_a_coordinator_that_serves(etcd: Etcd, keys: Keys, coordinated: Job) -> None:
    coordinate(etcd, keys, coordinated)
    etcd.delete(keys.coordinator_addr)
    status = read_status(etcd, keys)
    assert status.waiting == "a coordinator"
    assert "WAITING for a coordinator" in format_line(status)
    etcd.delete_prefix(keys.coordinators)
    etcd.delete(keys.task_counts)
    line = format_line(read_status(etcd, keys))
    assert "WAITING for a coordinator  chunks not counted" in line
    etcd.put(keys.state, b"complete")
    assert read_status(etcd, keys).waiting == ""


def test_a_pass_that_the_coordinator_has_dropped_is_done(etcd: Etcd, keys: Keys) -> None:
    etcd.put(keys.task_counts, msgspec.json.encode({3: TaskCounts(1, 2, 3)}))
    assert count_queue(etcd, keys, "coordinator", 3, 6) == TaskCounts(1, 2, 3)
    assert count_queue(etcd, keys, "coordinator", 2, 6) == TaskCounts(0, 0, 6)


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


def test_where_processes_are_and_what_they_wait_for(etcd: Etcd, keys: Keys, job: Job) -> None:
    fill(etcd, keys, job)
    etcd.put(keys.trainer("2-cc"), msgspec.json.encode(Registration("2-cc", "", 22, "host")))
    lacks = "waiting for {GPU: 1}: no node of this Ray has GPU: 1, the largest has GPU: 0"
    places = ProcessLocations(etcd, keys)
    places.publish(
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
