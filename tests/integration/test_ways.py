"""Every way to start a job: by hand with any etcd, the script as one role, torchrun; and without fault tolerance."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.etcd import EmbeddedCluster, EmbeddedEtcd, Etcd, EtcdError
from graphft.runtime.etcd.messages import etcdrpc
from tests.integration import training
from tests.integration.plays import SCRIPT, Act, Pace, Program, at, await_gone, kill, look, play
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
SMALL = {"trainers": 2, "pservers": 1, "passes": 1}


@pytest.fixture(scope="module")
def plain() -> graphft.Program:
    return training.program(plain=True)


def model_of(folder: Path) -> dict[str, torch.Tensor]:
    model = training.network(plain=True)
    graphft.load_into(model, folder / "model.safetensors")
    return model.state_dict()


def test_by_hand_with_a_cluster_whose_leader_dies(plain: graphft.Program, folder: Path, pace: Pace) -> None:
    """Roles in any order, pservers without an index; an etcd of our own, with three members."""
    job = training.job(plain, pace=pace.file, trainers=2, passes=2, lease_ttl=60)  # fewer steps than the schedule has
    job.save(folder / "job")

    def kill_leader() -> bool:
        with contextlib.suppress(EtcdError):  # an election is under way
            cluster.leader().kill()
            return True
        return False

    with EmbeddedCluster(folder / "cluster", heartbeat=200, election=2000) as cluster:
        start = ["-m", "graphft", "start", "--job", folder / "job", "--etcd", ",".join(cluster.endpoints)]
        roles = [Program(folder, *start, role) for role in ("trainer", "pserver", "coordinator", "pserver", "trainer")]
        trainer = roles[0]
        trainer.until(folder / "job", lambda s: at(10)(s) and len(s.slots) == 2, etcd=",".join(cluster.endpoints))
        until(kill_leader)
        trainer.until(folder / "job", at(40), etcd=",".join(cluster.endpoints))
        pace.set(0)
        assert [role.wait() for role in roles] == [0] * 5, [role.output for role in roles]
    eager = training.trained_in_one_process(job, training.network(plain=True))
    for name, value in model_of(folder / "job").items():
        torch.testing.assert_close(value, eager[name], rtol=1e-3, atol=1e-4)


@pytest.fixture
def locked_etcd(folder: Path) -> Iterator[EmbeddedEtcd]:
    """An etcd that wants a login."""
    with EmbeddedEtcd(folder / "locked") as server:
        with Etcd(server.endpoints) as client:
            client.ping(deadline=60)  # what follows is not tried again
            auth = client._calls._auth
            auth.UserAdd(etcdrpc.AuthUserAddRequest(name="root", password="secret"))
            auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user="root", role="root"))
            auth.AuthEnable(etcdrpc.AuthEnableRequest())
        yield server


def test_the_script_as_each_role_with_an_etcd_that_wants_a_login(
    folder: Path, pace: Pace, locked_etcd: EmbeddedEtcd
) -> None:
    pace.set(0)
    environment = {
        "GRAPHFT_ETCD": locked_etcd.endpoints[0],
        "GRAPHFT_JOB_DIR": str(folder / "job"),
        "GRAPHFT_ETCD_USER": "root",
        "GRAPHFT_ETCD_PASSWORD": "secret",
    }
    roles = [
        Program(folder, SCRIPT, pace.file, json.dumps(SMALL), GRAPHFT_ROLE=role, **environment)
        for role in ("trainer", "pserver")
    ]
    assert [role.wait() for role in roles] == [0, 0], [role.output for role in roles]
    assert (folder / "job" / "model.safetensors").exists()


@pytest.mark.parametrize("dispatch", ["etcd", "coordinator"])
def test_torchrun_ranks(folder: Path, pace: Pace, dispatch: str) -> None:
    """The first ranks are pservers, the next one the coordinator if the job has one; rank 0 starts etcd, and ends it
    last. All killed and started again, they go on."""
    options, world = json.dumps({**SMALL, "dispatch": dispatch}), 3 + (dispatch == "coordinator")

    def start() -> list[Program]:
        return [
            Program(folder, SCRIPT, pace.file, options, RANK=str(rank), WORLD_SIZE=str(world)) for rank in range(world)
        ]

    pace.set(0.5)  # it is looked at from outside, which takes its time on a busy machine
    ranks = start()
    ranks[0].until(folder / "jobs" / "blobs" / "runs" / "1", lambda s: at(12)(s) and (s.checkpoint or 0) >= 10)
    for rank in ranks:
        rank.kill()
    assert not await_gone(folder), "its etcd ended with rank 0"
    pace.set(0)  # some may be so late that the job is over
    ranks = start()
    assert [rank.wait() for rank in ranks] == [0] * world, [rank.output for rank in ranks]
    assert re.search("goes on from step [1-9]0", ranks[0].output), ranks[0].output
    assert "pserver 0" in ranks[0].output
    assert "trainer 1" in ranks[-1].output
    if dispatch == "coordinator":
        assert "[coordinator 0] coordinator 0 gives out tasks" in ranks[1].output
    assert (folder / "jobs" / "blobs" / "runs" / "1" / "model.safetensors").exists()


def test_without_fault_tolerance_it_trains_as_well_and_ends_at_the_first_death(
    plain: graphft.Program, folder: Path, pace: Pace
) -> None:
    """The job that failed is not in the way of the next run in its folder, which begins anew."""
    job = training.job(plain, pace=pace.file, ft=False, passes=2)
    with pytest.raises(GraphftError) as caught:
        play(job, folder, [Act(at(5), kill("trainer", 1))])
    assert caught.value.rule == "job-failed"
    assert "trainer 1 died (killed by SIGKILL" in caught.value.message
    assert "and the job has no fault tolerance (ft=False)" in caught.value.message
    assert not (folder / "model.safetensors").exists()
    pace.set(0)
    played = play(job, folder)
    eager = training.trained_in_one_process(job, training.network(plain=True))
    for name, value in model_of(folder).items():
        torch.testing.assert_close(value, eager[name], rtol=1e-3, atol=1e-4)
    assert played.result.steps == job.config.total_steps


def test_a_name_in_an_etcd_of_others_is_free_again_when_its_job_is_over(
    plain: graphft.Program, folder: Path, pace: Pace, etcd_server: EmbeddedEtcd
) -> None:
    """Complete, or dead without fault tolerance: nothing of it is taken for the next job's, nor is in its way."""
    endpoint = etcd_server.endpoints[0]
    unsafe = training.job(plain, pace=pace.file, trainers=1, pservers=1, passes=1, ft=False, name="again")
    unsafe.save(folder / "killed")
    launcher = Program(folder, "-m", "graphft", "launch", "--job", folder / "killed", "--etcd", endpoint)
    launcher.until(folder / "killed", at(5))
    launcher.kill()
    assert not await_gone(folder)
    pace.set(0)
    for job, name in ((unsafe, "killed"), (unsafe, "new"), (training.job(plain, passes=1, name="again"), "other")):
        played = play(job, folder / name, etcd=endpoint)
        assert played.result.steps == job.config.total_steps
        assert played.result.model.exists()


def test_a_launcher_that_is_told_to_end_leaves_nobody_in_an_etcd_of_others(
    plain: graphft.Program, folder: Path, pace: Pace, etcd_server: EmbeddedEtcd
) -> None:
    """The job can be started again at once: no lease of its processes is left to be waited for."""
    training.job(plain, pace=pace.file, trainers=1, pservers=1, name="told", lease_ttl=60).save(folder)
    command = ["-m", "graphft", "launch", "--job", folder, "--etcd", etcd_server.endpoints[0]]
    launcher = Program(folder, *command)
    launcher.until(folder, at(1))
    launcher.process.terminate()
    assert launcher.wait(120) == 143, launcher.output
    assert re.search(r"^interrupted at step \d+ of \d+; run again to resume ", launcher.output, re.M), launcher.output
    assert "Traceback" not in launcher.output

    def nobody_is_there() -> bool:
        status = look(folder)
        found = status and (status.state, status.pservers, status.trainers, status.slots)
        return found == ("running", {}, {}, {})

    until(nobody_is_there, 30)  # long before a lease would have ended


def test_what_a_launcher_leaves_to_others_is_named_until_they_come(
    plain: graphft.Program, folder: Path, pace: Pace, etcd_server: EmbeddedEtcd
) -> None:
    """With an etcd that others reach. With its own etcd the launcher would wait for ever, and refuses at once."""
    pace.set(0)
    training.job(plain, pace=pace.file, trainers=1, pservers=2, passes=1, name="shared", lease_ttl=60).save(folder)
    launch = ["-m", "graphft", "launch", "--job", folder, "--quiet", "--pservers", "1"]
    alone = Program(folder, *launch)
    assert alone.wait() == 2
    assert alone.output.startswith("error[option]: pservers is 1, but the job has 2, and this launcher brings its own")
    etcd = etcd_server.endpoints[0]
    one = Program(folder, *launch, "--etcd", etcd)
    one.says(f"waiting for pserver 1, which this launcher does not start (elsewhere: graphft start ROLE --job {folder}")
    other = Program(folder, "-m", "graphft", "start", "pserver", "--job", folder, "--etcd", etcd)
    assert (one.wait(), other.wait()) == (0, 0), one.output + other.output
    assert one.output.startswith(f"new run in {folder}\n")
