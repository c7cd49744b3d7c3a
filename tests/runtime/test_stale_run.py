"""An earlier run has left records in etcd when another run of its name begins."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from msgspec.structs import replace

from graphft.errors import GraphftError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.coordination.revoker import Revoker
from graphft.runtime.coordination.run_record import begin_anew, fenced, forget_dead, make_way, put_job, revoke_dead
from graphft.runtime.etcd import Etcd, LeaseLost, absent, put_op
from graphft.runtime.process.identity import UNKNOWN, Identity, identify
from graphft.transpiler.job import Job


def test_leases_end_of_processes_that_are_no_more_and_ran_here(etcd: Etcd, keys: Keys) -> None:
    gone, elsewhere = ended(), replace(ended(), machine="another")
    for name, process in (("dead", gone), ("alive", identify()), ("elsewhere", elsewhere), ("unknown", UNKNOWN)):
        register(etcd, keys.trainer(name), process)
    register(etcd, keys.pserver(0), gone)
    revoke_dead(etcd, keys)
    left = {kv.key for kv in etcd.range(keys.control).kvs}
    assert left == {keys.trainer("alive"), keys.trainer("elsewhere"), keys.trainer("unknown")}


def test_a_lease_is_revoked_when_etcd_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    revoker, answers = Revoker(Mock(), Keys("job")), iter([False, False, True])
    monkeypatch.setattr(revoker, "try_once", lambda *_: next(answers))
    monkeypatch.setattr("graphft.runtime.coordination.revoker.LATE_EVERY_SECONDS", 0.0)
    revoker.revoke(identify())
    revoker.step()
    assert revoker._left
    revoker.step()
    assert not revoker._left


def ended() -> Identity:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    process.communicate(b"\n")
    return identity


def register(etcd: Etcd, key: str, process: Identity) -> None:
    record = Registration(key, "", process.pid, socket.gethostname(), process=process)
    etcd.put(key, msgspec.json.encode(record), etcd.lease_grant(600)[0])


def run_of(job: Job, keys: Keys, folder: Path | None = None, ft: bool = True) -> Job:
    """A run of its own of this job, under the test's name, saved if it has a folder."""
    run = Job(job.source, job.config.replace(name=keys.job, ft=ft), job.programs)
    if folder is not None:
        run = Job.make(run.source, run.config)
        run.save(folder)
    return run


def leave(etcd: Etcd, keys: Keys, run: Job, folder: Path | None = None, state: bytes = b"running") -> None:
    put_job(etcd, keys, run, folder)
    for key in (keys.discarded(1), f"{keys.events}1"):
        etcd.put(key, b"{}")
    etcd.put(keys.state, state)


def everything(etcd: Etcd, keys: Keys) -> int:
    return sum(etcd.count(prefix) for prefix in keys.everything)


@pytest.mark.parametrize("state", [b"complete", b"failed"])
def test_another_run_that_is_over_makes_way_whole(etcd: Etcd, keys: Keys, job: Job, state: bytes) -> None:
    etcd.put(f"/{keys.job}-2/spec", b"another job's")
    leave(etcd, keys, run_of(job, keys), state=state)
    make_way(etcd, keys, run_of(job, keys))
    assert everything(etcd, keys) == 0
    assert etcd.count(f"/{keys.job}-2/") == 1


@pytest.mark.parametrize("state", [b"running", b"complete"])
def test_a_living_process_keeps_its_run(etcd: Etcd, keys: Keys, job: Job, state: bytes) -> None:
    leave(etcd, keys, run_of(job, keys), state=state)
    register(etcd, keys.trainer("t"), identify())
    for call in (lambda: make_way(etcd, keys, run_of(job, keys)), lambda: forget_dead(etcd, keys)):
        with pytest.raises(GraphftError, match=f"/t on {socket.gethostname()}"):
            call()
    assert etcd.get(keys.spec) is not None
    forget_dead(etcd, keys, force=True)
    assert everything(etcd, keys) == 0


def test_without_fault_tolerance_nothing_of_an_unfinished_run_with_it_goes(
    etcd: Etcd, keys: Keys, job: Job, tmp_path: Path
) -> None:
    leave(etcd, keys, run_of(job, keys, tmp_path / "job"), tmp_path / "job")
    before, other = everything(etcd, keys), run_of(job, keys, tmp_path / "other", ft=False)
    with pytest.raises(GraphftError, match="unfinished"):
        make_way(etcd, keys, other)
    begin_anew(etcd, keys, other, tmp_path / "other")
    assert everything(etcd, keys) == before


def test_a_run_begins_anew_only_if_it_cannot_go_on(etcd: Etcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    run = run_of(job, keys)
    leave(etcd, keys, run)
    begin_anew(etcd, keys, run, tmp_path)
    assert etcd.get(keys.spec) is not None, "it can be gone on with"
    etcd.put(keys.state, b"complete")
    with pytest.raises(GraphftError, match="is complete, and its model is gone"):
        begin_anew(etcd, keys, run, tmp_path)
    plain = Job(run.source, run.config.replace(ft=False), run.programs, run_id=run.run_id)
    begin_anew(etcd, keys, plain, tmp_path)
    assert everything(etcd, keys) == 0


class Overtaken:
    """A store in which the job begins anew before the next transaction."""

    def __init__(self, etcd: Etcd, keys: Keys) -> None:
        self.etcd, self.keys, self.range = etcd, keys, etcd.range

    def txn(self, *args: Any, **kwargs: Any) -> Any:
        self.etcd.put(self.keys.state, b"running")
        return self.etcd.txn(*args, **kwargs)


def test_what_began_meanwhile_is_not_forgotten(etcd: Etcd, keys: Keys, job: Job) -> None:
    leave(etcd, keys, run_of(job, keys), state=b"complete")
    before = everything(etcd, keys)
    make_way(cast("Etcd", Overtaken(etcd, keys)), keys, run_of(job, keys))
    assert everything(etcd, keys) == before


# -- what processes of the run before can still do ---------------------------------------------------------------------


def test_two_runs_of_one_job_do_not_merge(etcd: Etcd, keys: Keys, job: Job) -> None:
    one, other = run_of(job, keys), run_of(job, keys)
    put_job(etcd, keys, one)
    put_job(etcd, keys, one)  # by its next process
    with pytest.raises(GraphftError, match=one.run_id) as refused:
        put_job(etcd, keys, other)
    assert refused.value.rule == "foreign-job"


def test_a_process_of_the_run_before_changes_nothing(etcd: Etcd, keys: Keys, job: Job) -> None:
    before, after = run_of(job, keys), run_of(job, keys)
    put_job(etcd, keys, before)
    zombie = fenced(etcd, keys, before)
    zombie.put(keys.events + "1", b"{}")
    etcd.put(keys.state, b"complete")
    make_way(etcd, keys, after)
    attempts = [
        lambda: zombie.put(keys.slot(0), b"zombie"),
        lambda: zombie.delete(keys.state),
        lambda: zombie.delete_prefix(keys.control),
        lambda: zombie.txn([], [put_op(keys.generation, b"{}")]),
        lambda: zombie.txn([absent(keys.generation)], [put_op(keys.generation, b"{}")], token=keys.generation),
    ]
    for attempt in attempts:
        with pytest.raises(LeaseLost, match="is gone"):
            attempt()
    put_job(etcd, keys, after)
    records = etcd.range(keys.control).kvs
    for attempt in attempts:
        with pytest.raises(GraphftError, match=f"this process is of run '{before.run_id}'") as refused:
            attempt()
        assert refused.value.rule == "foreign-job"
    assert etcd.range(keys.control).kvs == records


def test_a_copy_of_a_runs_folder_is_no_part_of_the_run(etcd: Etcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    run = run_of(job, keys, tmp_path / "job")
    put_job(etcd, keys, run, tmp_path / "job")
    (tmp_path / "same").symlink_to(tmp_path / "job")
    put_job(etcd, keys, run, tmp_path / "same")
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    with pytest.raises(GraphftError, match=f"{tmp_path / 'copy'} is a copy of {tmp_path / 'job'}") as refused:
        put_job(etcd, keys, Job.load(tmp_path / "copy"), tmp_path / "copy")
    assert refused.value.rule == "foreign-job"
