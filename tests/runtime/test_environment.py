"""The environment says which role a process is, and where etcd is."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
import torch

from graphft.errors import GraphftError
from graphft.options import find_device
from graphft.runtime.coordination import connect as connect_module
from graphft.runtime.coordination.connect import connect, connect_role, write_endpoints
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import Etcd, EtcdError
from graphft.runtime.execute.determinism import enforce
from graphft.runtime.launcher.launch import run_job
from graphft.runtime.launcher.options import LaunchOptions
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_LEASE_LOST, EXIT_USAGE
from graphft.runtime.roles import environment
from graphft.runtime.roles.environment import RoleSpec, role_of_environment, run_as_role, run_role
from graphft.transpiler.job import Job

pytestmark = pytest.mark.usefixtures("own_folder", "patient")


# -- which role -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "role"),
    [
        ({}, None),
        (
            {"GRAPHFT_ROLE": "pserver", "GRAPHFT_INDEX": "1", "GRAPHFT_JOB_DIR": "/j", "GRAPHFT_ETCD": "h:1,h:2"},
            RoleSpec("pserver", 1, "/j", "h:1,h:2"),
        ),
        ({"GRAPHFT_ROLE": "coordinator", "GRAPHFT_INDEX": ""}, RoleSpec("coordinator")),
        ({"GRAPHFT_ROLE": "trainer", "RANK": "0", "WORLD_SIZE": "4"}, RoleSpec("trainer")),
        ({"RANK": "0", "WORLD_SIZE": "4"}, RoleSpec("pserver", 0, embed_etcd=True)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, RoleSpec("trainer", 0)),
        ({"RANK": "0", "WORLD_SIZE": "3", "GRAPHFT_ETCD": "h:1"}, RoleSpec("pserver", 0, "", "h:1")),
        ({"RANK": "0", "WORLD_SIZE": "1", "GRAPHFT_LAUNCH": "{}"}, None),
    ],
)
def test_role_of_environment(env: dict[str, str], role: RoleSpec | None) -> None:
    assert role_of_environment(env, pservers=2) == role


def test_the_rank_after_the_pservers_is_the_coordinator_of_a_job_that_has_one() -> None:
    ranks = [role_of_environment({"RANK": str(r), "WORLD_SIZE": "4"}, 2, coordinator=True) for r in range(4)]
    assert [role.kind for role in ranks if role is not None] == ["pserver", "pserver", "coordinator", "trainer"]
    with pytest.raises(GraphftError, match="WORLD_SIZE is 3, but the job has 2 pservers, a coordinator") as caught:
        role_of_environment({"RANK": "0", "WORLD_SIZE": "3"}, 2, coordinator=True)
    assert caught.value.help == "start at least 4 processes"


@pytest.mark.parametrize(
    ("env", "rule", "message"),
    [
        ({"GRAPHFT_ROLE": "Trainer"}, "role", "GRAPHFT_ROLE is 'Trainer'"),
        ({"GRAPHFT_ROLE": "pserver", "GRAPHFT_INDEX": "one"}, "environment", "GRAPHFT_INDEX is 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "world-size", "WORLD_SIZE is 2, but the job has 2 pservers"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "environment", "RANK is 4, expected 0 to 3"),
    ],
)
def test_environments_that_make_no_sense(env: dict[str, str], rule: str, message: str) -> None:
    with pytest.raises(GraphftError, match=message) as caught:
        role_of_environment(env, pservers=2)
    assert caught.value.rule == rule
    assert caught.value.help


@pytest.mark.parametrize("fresh", [False, True])
def test_a_script_with_a_wrong_environment_ends_with_2(
    job: Job, fresh: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHFT_ROLE", "trainer" if fresh else "cook")
    with pytest.raises(SystemExit) as ended:
        run_job(job, fresh=fresh)
    assert ended.value.code == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error[")


# -- running as one ---------------------------------------------------------------------------------------------------


def error_of(spec: RoleSpec, job: Job, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = run_role(job, folder, spec)
    return status, capsys.readouterr().err


@pytest.mark.usefixtures("logging_restored")
def test_what_starting_again_cannot_mend_ends_with_2(
    job: Job, saved: Path, etcd: Etcd, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ",".join(etcd.endpoints)
    for kind, config, endpoints, message in (
        ("trainer", {"torch_version": "1.0"}, here, "torch: the job has 1.0"),
        ("trainer", {}, "a:b:c", "not an etcd endpoint"),
        ("pserver", {"name": keys.job}, here, "there is no pserver 2"),
    ):
        other = Job(job.source, job.config.replace(**config), job.programs)
        status, err = error_of(RoleSpec(kind, 2, etcd=endpoints), other, saved, capsys)
        assert (status, message in err, "Traceback" in err) == (EXIT_USAGE, True, False), err
        assert f"[{kind} 2]" in err
    named = Job(job.source, job.config.replace(name=keys.job), job.programs)
    etcd.delete_prefix(keys.control)
    put_job(etcd, keys, Job.make(job.source, job.config.replace(seed=5)))
    status, err = error_of(RoleSpec("trainer", 0, etcd=here), named, saved, capsys)
    assert (status, "error[foreign-job]" in err) == (EXIT_USAGE, True)


@pytest.mark.usefixtures("logging_restored", "soon")
def test_what_starting_again_may_mend_does_not_end_with_2(
    job: Job, saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "connect_role", functools.partial(connect_module.connect_role, wait=0.2))
    status, err = error_of(RoleSpec("trainer", 0, etcd="127.0.0.1:1"), job, saved, capsys)
    assert (status, "error[etcd-unreachable]" in err) == (EXIT_LEASE_LOST, True), "no failure that a launcher counts"
    status, err = error_of(RoleSpec("trainer", 0), job, saved, capsys)
    assert (status, "error[etcd-endpoints]" in err) == (EXIT_FAILED, True)
    assert "Traceback" not in err


def test_a_role_refuses_a_folder_with_another_job(job: Job, saved: Path) -> None:
    other = Job.make(job.source, job.config.replace(seed=1))
    with pytest.raises(GraphftError, match="holds another job") as caught:
        run_as_role(other, RoleSpec("trainer", job_dir=str(saved)))
    assert caught.value.rule == "job-directory"


def test_determinism_is_enforced(job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    with pytest.raises(GraphftError, match=r"the program is to compute on cuda:99, which is not on") as caught:
        find_device("cuda:99")
    assert caught.value.rule == "device"
    enforce(job.config.replace(threads=3))
    assert used == [3]
    assert not caplog.records
    different = job.config.replace(torch_version="1.0", cpu_capability="ABACUS")
    with pytest.raises(GraphftError, match=r"torch: the job has 1\.0.*CPU capability: the job has ABACUS") as caught:
        enforce(different)
    assert caught.value.rule == "determinism"
    enforce(different.replace(exact=False))
    assert "would not give the bits of the others" in caplog.text
    enforce(job.config.replace(torch_version="", cpu_capability=""))


# -- etcd -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon")
def test_what_an_earlier_run_left_is_followed_by_something_newer(etcd: Etcd, tmp_path: Path) -> None:
    write_endpoints(tmp_path, "127.0.0.1:1")
    later = threading.Timer(0.3, write_endpoints, (tmp_path, ",".join(etcd.endpoints)))
    later.start()
    with connect_role(tmp_path, wait=120) as client:
        assert client.endpoints == etcd.endpoints
    later.join()


def test_login_and_certificates_come_from_the_environment(etcd: Etcd, tmp_path: Path) -> None:
    here = ",".join(etcd.endpoints)
    connect(here, environ={"GRAPHFT_ETCD_USER": "", "GRAPHFT_ETCD_CA": ""}).close()
    with pytest.raises(EtcdError, match="authentication is not enabled"):
        connect(here, environ={"GRAPHFT_ETCD_USER": "me", "GRAPHFT_ETCD_PASSWORD": "secret"})
    with pytest.raises(EtcdError, match=r"nosuch\.pem") as caught:
        connect(here, environ={"GRAPHFT_ETCD_CA": str(tmp_path / "nosuch.pem")})
    assert caught.value.rule == "etcd-tls"


# -- launching --------------------------------------------------------------------------------------------------------


def test_unknown_options_are_refused(job: Job) -> None:
    with pytest.raises(GraphftError, match="run has no option trainer") as caught:
        run_job(job, trainer=3)
    assert "did you mean trainers?" in caught.value.help
    with pytest.raises(GraphftError, match="pservers is -1"):
        LaunchOptions(pservers=-1)
