"""The launcher keeps in the folder where its job's time goes, from launch to launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Generation, Ordered, Registration, ShardStatus, TrainerStatus
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.page.time_keeper import FILE, TimeKeeper, read_time, seen_of
from graphft.transpiler.job import Job


class Clock:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def running(etcd: Etcd, keys: Keys, job: Job) -> JobStatus:
    put_job(etcd, keys, job)
    etcd.put(keys.generation, msgspec.json.encode(Generation(1, 4)))
    etcd.put(keys.pserver(0), msgspec.json.encode(Registration("0-ps", "", 1, "host")))
    etcd.put(keys.status_of("pserver", "0"), msgspec.json.encode(ShardStatus(7, 1, checkpoint_seconds=0.5)))
    etcd.put(keys.trainer("0-aa"), msgspec.json.encode(Registration("0-aa", "", 2, "host")))
    told = TrainerStatus(9, 1, seconds={"computing": 3.0, "data": 1.0}, unreached=["shard 1 at a:1"])
    etcd.put(keys.status_of("trainer", "0-aa"), msgspec.json.encode(told))
    return read_status(etcd, keys, brief=True)


def test_what_the_ledger_sees_of_a_status(running: JobStatus, etcd: Etcd, keys: Keys) -> None:
    seen = seen_of(running)
    assert (seen.step, seen.generation) == (7, 1)
    assert seen.total_steps == running.spec["total_steps"]
    assert seen.members == {"0-ps", "0-aa"}
    assert (seen.whole, seen.waits, seen.cut_off, seen.over) == (False, False, True, False)
    assert seen.trainers == {"0-aa": {"computing": 3.0, "data": 1.0}}
    assert seen.checkpoints == {"0-ps": 0.5}
    assert seen_of(replace(running, pservers=dict.fromkeys(range(2), running.pservers[0]))).whole
    assert seen_of(replace(running, state="failed")).over
    etcd.put(keys.status_of("trainer", "0-aa"), msgspec.json.encode(TrainerStatus(paused=True)))
    assert seen_of(read_status(etcd, keys, brief=True)).waits
    etcd.put(keys.status_of("trainer", "0-aa"), msgspec.json.encode(TrainerStatus(paused=True, validating=True)))
    seen = seen_of(read_status(etcd, keys, brief=True))
    assert (seen.waits, seen.validates) == (False, True)
    etcd.put(keys.places + "x", msgspec.json.encode([Ordered("trainer", 0, "waiting for a GPU", 0)]))
    etcd.delete(keys.trainer("0-aa"))
    assert seen_of(read_status(etcd, keys, brief=True)).waits, "there is no room for a trainer"


def test_it_is_kept_and_carried_on(running: JobStatus, tmp_path: Path) -> None:
    clock = Clock()
    keeper = TimeKeeper(tmp_path, "run-1", clock.now - 2, 4, clock)
    for n in range(4):
        clock.now += 0.5
        keeper.look(replace(running, step=7 + n))
    keeper.write()
    kept = keeper.export()
    assert read_time(tmp_path, "run-1") == kept
    assert sum(kept["seconds"].values()) == pytest.approx(4.0)
    assert kept["seconds"]["starting"] == 2.5
    assert read_time(tmp_path, "run-2") is None, "another run's"
    after = TimeKeeper(tmp_path, "run-1", clock.now + 60, 4, clock).export()
    assert after["seconds"]["idle"] == 60
    assert sum(TimeKeeper(tmp_path, "run-2", clock.now, 4, clock).export()["seconds"].values()) == 0


def test_a_damaged_one_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TimeKeeper(tmp_path, "run-1", 999.0, 0, Clock()).write()
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (whole[:-9], whole.replace(b"9", b"8"), b"", b"[]"):
        (tmp_path / FILE).write_bytes(damaged)
        assert TimeKeeper(tmp_path, "run-1", 5e8, 0, Clock()).export()["began"] == 5e8
    assert "cannot be used" in caplog.text
