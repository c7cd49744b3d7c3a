"""A folder's run is at work in one etcd: the folder names it, and no process runs it in another one meanwhile."""

from __future__ import annotations

import logging
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from graphft.errors import UsageError
from graphft.runtime.coordination import connect as connect_module
from graphft.runtime.coordination import noted_etcd as noted_module
from graphft.runtime.coordination.connect import NOTE, read_endpoints, write_endpoints
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.noted_etcd import check_no_other_etcd, leave_note, read_note
from graphft.runtime.coordination.records import LoadingStatus, Registration
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.process.identity import identify
from graphft.runtime.process.role_process import EXIT_OK, EXIT_USAGE
from graphft.runtime.roles.environment import RoleSpec, run_role
from graphft.transpiler import Job
from tests.support.commands import refused, shown

NOBODY = "127.0.0.1:1"
pytestmark = pytest.mark.usefixtures("logging_restored", "patient")


@pytest.fixture
def mine(keys: Keys, job: Job, tmp_path: Path) -> Job:
    """A job in the folder `mine`, whose name is no other's in the session's etcd."""
    named = Job.make(job.source, job.config.replace(name=keys.job))
    named.save(tmp_path / "mine")
    return named


@pytest.fixture
def folder(mine: Job, tmp_path: Path) -> Path:
    return tmp_path / "mine"


def text_of(etcd: Etcd) -> str:
    return ",".join(etcd.endpoints)


def register(etcd: Etcd, keys: Keys, pid: int | None = None) -> None:
    """A pserver that is this process, or a child of it."""
    record = Registration("0-p", "tcp://127.0.0.1:1", 7, "gpu3", "", identify(pid))
    etcd.put(keys.pserver(0), msgspec.json.encode(record))


@pytest.fixture
def at_work(etcd: Etcd, keys: Keys, mine: Job, folder: Path) -> None:
    """By hand, in an etcd of the user's."""
    put_job(etcd, keys, mine, folder)
    register(etcd, keys)
    write_endpoints(folder, text_of(etcd))


# -- the note ---------------------------------------------------------------------------------------------------------


def test_a_role_notes_the_etcd_that_it_was_given(
    capsys: pytest.CaptureFixture[str], etcd: Etcd, keys: Keys, mine: Job, folder: Path
) -> None:
    """`graphft status --job` called what ran by hand "never begun"."""
    put_job(etcd, keys, mine, folder)
    etcd.put(keys.state, b"complete")
    assert run_role(mine, folder, RoleSpec("coordinator", etcd=text_of(etcd))) == EXIT_OK
    assert (read_note(folder).endpoints, read_note(folder).own) == (text_of(etcd), False)
    etcd.put(keys.state, b"running")
    register(etcd, keys)
    capsys.readouterr()  # what the role logged
    assert f"graphft job {keys.job}: running" in shown(capsys, "status", "--job", folder)


def test_a_folder_that_takes_no_note_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphft")
    (tmp_path / "file").touch()
    leave_note(tmp_path / "file", NOBODY)
    assert "cannot note in" in caplog.text


def test_an_older_note_is_of_the_jobs_own_etcd_if_its_data_are_here(tmp_path: Path) -> None:
    (tmp_path / NOTE).write_text(f'{{"endpoints": "{NOBODY}"}}')
    assert not read_note(tmp_path).own
    (tmp_path / "etcd").mkdir()
    assert read_note(tmp_path).own


@pytest.mark.parametrize("data", ['{"endpoints": "h:0"}', '{"endpoints": "h:1", "own": 7}'])
def test_a_damaged_note_is_none(tmp_path: Path, data: str) -> None:
    (tmp_path / NOTE).write_text(data)
    assert read_note(tmp_path).endpoints == ""


# -- a second etcd ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_work")
def test_a_launch_with_an_etcd_of_its_own_is_refused(
    capsys: pytest.CaptureFixture[str], etcd: Etcd, keys: Keys, folder: Path
) -> None:
    """Two jobs wrote to one folder of checkpoints, and each deleted the other's."""
    before = sorted(folder.rglob("*"))
    said = refused(capsys, "launch", "--job", folder)
    assert f"error[job-running]: the job in {folder} is being run in the etcd {text_of(etcd)}, by a pserver" in said
    assert f"join it with --etcd {text_of(etcd)}, or stop its processes first" in said
    assert [path for path in sorted(folder.rglob("*")) if path.name != "launcher.lock"] == before
    etcd.delete(keys.pserver(0))
    advice = f"graphft launch --job {folder} --etcd {text_of(etcd)} goes on with it"
    assert advice in shown(capsys, "status", "--job", folder)


def test_a_process_that_loads_is_at_work(etcd: Etcd, keys: Keys, mine: Job, folder: Path) -> None:
    put_job(etcd, keys, mine, folder)
    write_endpoints(folder, text_of(etcd))
    check_no_other_etcd(folder, mine)
    loading = LoadingStatus("trainer", "data", 0.0, 7, "gpu3", identify())
    etcd.put(f"{keys.status}loading/trainer/0-t", msgspec.json.encode(loading))
    with pytest.raises(UsageError, match="a process that loads"):
        check_no_other_etcd(folder, mine)


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("own", [True, False])
def test_a_role_with_another_etcd_is_refused(
    capsys: pytest.CaptureFixture[str], etcd: Etcd, folder: Path, mine: Job, tmp_path: Path, own: bool
) -> None:
    """Also while a launcher is at work in the folder, with an etcd of its own."""
    write_endpoints(folder, text_of(etcd), own=own)
    with EmbeddedEtcd(tmp_path / "second") as second:
        assert run_role(mine, folder, RoleSpec("pserver", 0, etcd=second.endpoints[0])) == EXIT_USAGE
        with Etcd(second.endpoints, deadline=60) as other:
            assert other.count("/") == 0
    assert "error[job-running]" in capsys.readouterr().err
    assert read_endpoints(folder) == text_of(etcd)


@pytest.mark.usefixtures("at_work")
def test_another_name_of_the_same_etcd_is_none(etcd: Etcd, mine: Job, folder: Path) -> None:
    write_endpoints(folder, text_of(etcd).replace("127.0.0.1", "localhost"))
    assert check_no_other_etcd(folder, mine, etcd)


@pytest.mark.usefixtures("at_work")
@pytest.mark.parametrize("case", ["dead", "over", "forgotten", "another run", "a copy"])
def test_a_run_that_is_not_at_work_there_goes_on(
    etcd: Etcd, keys: Keys, mine: Job, folder: Path, tmp_path: Path, case: str
) -> None:
    with pytest.raises(UsageError, match="is being run"):
        check_no_other_etcd(folder, mine)
    if case == "dead":
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            register(etcd, keys, process.pid)
    elif case == "over":
        etcd.put(keys.state, b"failed")
    elif case == "forgotten":
        etcd.delete_prefix(f"/{keys.job}")
    elif case == "another run":
        etcd.delete_prefix(f"/{keys.job}")
        put_job(etcd, keys, Job.make(mine.source, mine.config))
        register(etcd, keys)
    else:
        folder = shutil.copytree(folder, tmp_path / "copy")
    assert not check_no_other_etcd(folder, mine)


# -- an etcd that does not answer -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("soon")
def test_a_launch_is_refused_while_the_users_etcd_does_not_answer(
    capsys: pytest.CaptureFixture[str], folder: Path, mine: Job
) -> None:
    write_endpoints(folder, NOBODY)
    said = refused(capsys, "launch", "--job", folder)
    assert f"error[etcd-endpoints]: {folder / NOTE} says that this run is in the etcd {NOBODY}" in said
    assert f"delete {folder / NOTE}" in said
    assert look_at(folder).state == "unknown"
    (folder / NOTE).unlink()
    assert not check_no_other_etcd(folder, mine), "as the error says"


@pytest.mark.usefixtures("soon")
def test_one_that_was_started_with_the_job_is_gone_with_its_launcher(folder: Path, mine: Job) -> None:
    write_endpoints(folder, NOBODY, own=True)
    assert not check_no_other_etcd(folder, mine)
    assert look_at(folder).state == "stopped"


@pytest.mark.parametrize("later", ["a-later-boot net:[1]", "0 net:[1]"])
def test_an_etcd_on_this_machine_before_it_was_started_again_is_gone(
    later: str, folder: Path, mine: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the ids of both boots begin alike."""
    monkeypatch.setattr(connect_module, "network_identity", lambda: "0123-4567 net:[1]")
    write_endpoints(folder, NOBODY)
    monkeypatch.setattr(noted_module, "network_identity", lambda: later)
    assert not check_no_other_etcd(folder, mine)
    assert look_at(folder).state == "stopped"


HOLDS = """
import sys
from pathlib import Path
from graphft.runtime.process.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


@pytest.mark.usefixtures("soon")
def test_the_etcd_of_a_launcher_on_another_machine_is_not_passed_over(etcd: Etcd, folder: Path, mine: Job) -> None:
    """It holds the folder's lock, and its etcd is on its own loopback."""
    write_endpoints(folder, NOBODY, own=True)
    assert not check_no_other_etcd(folder, mine, etcd)
    command = [sys.executable, "-c", HOLDS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        with pytest.raises(UsageError, match=f"being run by pid {launcher.pid} on .*, with an etcd that no other"):
            check_no_other_etcd(folder, mine, etcd)
        launcher.kill()


@pytest.mark.usefixtures("at_work")
def test_a_rank_that_would_start_an_etcd_is_refused(
    capsys: pytest.CaptureFixture[str], etcd: Etcd, folder: Path, mine: Job
) -> None:
    """torchrun's rank 0."""
    assert run_role(mine, folder, RoleSpec("pserver", 0, embed_etcd=True)) == EXIT_USAGE
    assert "error[job-running]" in capsys.readouterr().err
    assert read_endpoints(folder) == text_of(etcd)


@pytest.mark.usefixtures("soon")
def test_another_network_of_this_boot_is_not_gone(folder: Path, mine: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container, say."""
    write_endpoints(folder, NOBODY)
    booted, _, _ = noted_module.network_identity().partition(" ")
    monkeypatch.setattr(noted_module, "network_identity", lambda: f"{booted} net:[1]")
    with pytest.raises(UsageError, match="which does not answer here"):
        check_no_other_etcd(folder, mine)


@pytest.mark.usefixtures("at_work")
def test_another_machines_loopback_cannot_be_asked_from_here(
    etcd: Etcd, folder: Path, mine: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers there is another etcd."""
    monkeypatch.setattr(noted_module, "network_identity", lambda: "another network")
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    with pytest.raises(UsageError, match="which does not answer here"):
        check_no_other_etcd(folder, mine)


@pytest.mark.usefixtures("soon")
def test_another_etcd_that_was_given_takes_its_place(
    etcd: Etcd, folder: Path, mine: Job, caplog: pytest.LogCaptureFixture
) -> None:
    write_endpoints(folder, NOBODY)
    assert not check_no_other_etcd(folder, mine, etcd)
    assert f"it goes on in {text_of(etcd)}" in caplog.text
