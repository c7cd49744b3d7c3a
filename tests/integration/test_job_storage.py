"""Machines that share nothing but a storage and etcd: the job, its checkpoints and its model are in the storage."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from pathlib import Path

import pytest

from graphft import ir
from graphft.errors import GraphftError, UsageError
from graphft.runtime.cli import main
from graphft.runtime.coordination.job_files import fetch, publish
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.roles import environment
from graphft.transpiler.job import Job
from graphft.transpiler.record import read_record
from tests.integration import training
from tests.integration.plays import SCRIPT, Pace, Played, Program, assert_same_bits, at, processes_of, whole_state
from tests.support.s3_server import s3_server

pytestmark = pytest.mark.timeout(600)
S3 = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]


class Machine:
    """Its working directory is its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        folder.mkdir(parents=True)
        self.folder, self.environment = folder, environment

    def launch(self, *arguments: str | Path) -> Program:
        return Program(self.folder, "-m", "graphft", "launch", "--quiet", *arguments, **self.environment)

    def script(self, pace: Pace, **options: object) -> Program:
        return self.launch(SCRIPT, pace.file, json.dumps(options))

    def dies(self) -> None:
        """All its processes, and its disk."""
        for process in processes_of(self.folder):
            process.send_signal(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        for process in processes_of(self.folder):  # started meanwhile
            process.send_signal(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def url(folder: Path) -> str:
    return f"file://{folder}/storage/job"


def test_machines_die_with_their_disks(
    program: ir.Program, folder: Path, url: str, pace: Pace, undisturbed: Played, etcd_server: EmbeddedEtcd
) -> None:
    etcd = ",".join(etcd_server.endpoints)
    one, two, three = (Machine(folder / name) for name in ("one", "two", "three"))
    first = one.script(pace, name="stored", storage=url, etcd_endpoints=etcd)
    first.until(one.folder / "jobs" / "stored" / "runs" / "1", at(5), etcd)
    second = two.launch("--job", url, "--pservers", "0", "--trainers", "1", "--etcd", etcd)
    second.until(one.folder / "jobs" / "stored" / "runs" / "1", lambda s: at(22)(s) and len(s.trainers) == 4, etcd)
    one.dies()
    third = three.launch("--job", url, "--trainers", "2", "--etcd", etcd)
    third.until(three.folder / "jobs" / "job" / "runs" / "1", lambda s: at(30)(s) and s.generation > 0, etcd)
    pace.set(0)
    assert (third.wait(), second.wait()) == (0, 0), third.output + second.output
    job = three.folder / "jobs" / "job" / "runs" / "1"
    assert_same_bits(whole_state(Job.load(job), job), undisturbed.state)
    model = undisturbed.result.model.read_bytes()
    assert (job / "model.safetensors").read_bytes() == model
    assert (
        two.folder / "jobs" / "job" / "runs" / "1" / "model.safetensors"
    ).read_bytes() == model  # a launcher has it downloaded
    assert (folder / "storage" / "job" / "runs" / "1" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
@pytest.mark.skipif(bool(S3), reason=f"{', '.join(S3)} not installed")
def test_a_machine_and_its_etcd_are_lost_and_the_storage_is_s3(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played
) -> None:
    with s3_server("bucket") as options:
        environment = {
            "FSSPEC_S3_ENDPOINT_URL": options["endpoint_url"],
            "FSSPEC_S3_KEY": options["key"],
            "FSSPEC_S3_SECRET": options["secret"],
        }
        one, two = (Machine(folder / name, **environment) for name in ("one", "two"))
        first = one.script(pace, storage="s3://bucket/runs/blobs")
        first.until(one.folder / "jobs" / "blobs" / "runs" / "1", lambda s: at(25)(s) and (s.checkpoint or 0) >= 10)
        one.dies()
        pace.set(0)
        again = two.script(pace, storage="s3://bucket/runs/blobs")
        assert again.wait() == 0, again.output
    begun = again.output.splitlines()[0]
    assert begun.startswith("resuming jobs/blobs/runs/1 at step ")
    assert int(begun.split()[4]) >= 10
    model = (two.folder / "jobs" / "blobs" / "runs" / "1" / "model.safetensors").read_bytes()
    assert model == undisturbed.result.model.read_bytes()


def test_of_two_runs_that_take_a_storage_one_has_it(program: ir.Program, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage"
    jobs = [training.job(program, storage=url) for _ in range(2)]
    for number, job in enumerate(jobs):
        job.save(tmp_path / str(number))
    publish(tmp_path / "0")
    publish(tmp_path / "0")  # again: nothing happens
    with pytest.raises(UsageError, match=jobs[0].run_id):
        publish(tmp_path / "1")
    assert sorted(p.name for p in (tmp_path / "storage").iterdir()) == ["job-" + jobs[0].run_id, "job.json"]
    fetch(url, tmp_path / "copy")
    assert read_record(tmp_path / "copy").run_id == jobs[0].run_id
    with pytest.raises(UsageError, match="holds something else"):
        fetch(url, tmp_path / "1")


def test_a_storage_that_is_away_is_not_filled_anew(
    program: ir.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, storage = f"file://{tmp_path}/storage/job", tmp_path / "storage"
    training.job(program, storage=url).save(tmp_path / "here" / "jobs" / "job")
    monkeypatch.chdir(tmp_path / "here")
    folder, started = Path("jobs", "job"), []
    monkeypatch.setattr(environment, "run_role", lambda job, folder, spec, *more: started.append(str(folder)) or 0)
    assert main(["start", "pserver", "--job", str(folder)]) == 0  # the first role, of a job that was only saved
    fetch(url, tmp_path / "there")
    storage.rename(tmp_path / "unmounted")
    for copy in (folder, tmp_path / "there"):
        with pytest.raises(GraphftError, match="and holds nothing now"):
            publish(copy)
        with pytest.raises(GraphftError, match="holds no job"):
            fetch(url, copy)
    assert main(["start", "pserver", "--job", str(folder)]) == 0
    assert started == ["jobs/job"] * 2
    assert not storage.exists()
    (tmp_path / "unmounted").rename(storage)
    publish(folder)


def test_a_job_that_was_damaged_in_its_storage(program: ir.Program, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage"
    job = training.job(program, storage=url)
    job.save(tmp_path / "job")
    publish(tmp_path / "job")
    path = tmp_path / "storage" / f"job-{job.run_id}" / "programs" / "trainer" / "values.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(Exception, match=r"values\.safetensors is not what was uploaded"):
        fetch(url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    listing = path.parents[2] / "files.json"
    listing.write_text(json.dumps({"../../outside": ""}))
    with pytest.raises(Exception, match="names \\.\\./\\.\\./outside"):
        fetch(url, tmp_path / "copy")
    for wrong in (b"", b"{", b"[]", b'{"job.json": 7}', b'{"job.json": {"bytes": 1}}', b"\xff\x00"):
        listing.write_bytes(wrong)
        with pytest.raises(GraphftError, match=r"files\.json is damaged: "):
            fetch(url, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
