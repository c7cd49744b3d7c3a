"""The command line: what it prints, and how it refuses. Bad input: a clear error, exit status 2, no hang."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from graphft.ir.printer import format_program
from graphft.ir.storage import save_program
from graphft.runtime.cli import main
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.options import LaunchOptions
from graphft.transpiler.job import Job
from tests.support.commands import refused, shown
from tests.support.programs_by_hand import linear

NOBODY = "127.0.0.1:1"


pytestmark = pytest.mark.usefixtures("own_folder", "patient")


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_a_job(capsys: pytest.CaptureFixture[str], job: Job, saved: Path) -> None:
    whole = "".join(f"{format_program(p)}\n" for p in job.programs.by_name().values())
    assert shown(capsys, "show", saved) == whole
    assert shown(capsys, "show", saved, "--role", "pserver1") == f"{job.pserver_program(1)}\n"
    assert "it has trainer, pserver0, pserver1, coordinator" in refused(capsys, "show", saved, "--role", "pserver2")
    text = shown(capsys, "show", saved, "--passes")
    assert [line for line in text.splitlines() if line.startswith("=====")] == [
        f"===== after {stage.after or 'capture'}" for stage in job.passes
    ]
    assert text.endswith(whole)
    assert shown(capsys, "show", saved, "--diff") == f"{job.diff()}\n"


def test_show_a_program(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_program(linear(), tmp_path / "program")
    assert shown(capsys, "show", tmp_path / "program") == f"{linear()}\n"
    for option in (["--role", "trainer"], ["--passes"], ["--diff"]):
        assert f"{option[0]} is for jobs" in refused(capsys, "show", tmp_path / "program", *option)


# -- etcd -------------------------------------------------------------------------------------------------------------


def test_a_dead_run_is_forgotten_by_name(capsys: pytest.CaptureFixture[str], etcd: Etcd, keys: Keys, job: Job) -> None:
    put_job(etcd, keys, job)
    endpoints = ",".join(etcd.endpoints)
    assert f"forgotten: run {job.run_id}" in shown(capsys, "forget", keys.job, "--etcd", endpoints)
    assert "etcd knows no job" in refused(capsys, "forget", keys.job, "--etcd", endpoints)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("endpoints", "message"), [(NOBODY, "etcd did not answer"), ("a:b:c", "not an etcd endpoint")])
def test_etcd_that_cannot_be_reached(
    capsys: pytest.CaptureFixture[str], saved: Path, endpoints: str, message: str
) -> None:
    assert message in refused(capsys, "status", "--etcd", endpoints)
    assert message in refused(capsys, "launch", "--etcd", endpoints, "--job", saved)
    names = sorted(p.name for p in saved.iterdir())
    assert names == ["data", "job.json", "programs", "source"], "nothing half-written"


# -- launch and start -------------------------------------------------------------------------------------------------


def test_launch_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no script nosuch.py" in refused(capsys, "launch", "nosuch.py")
    assert "there is no script" in refused(capsys, "launch", tmp_path)
    assert "nothing to launch" in refused(capsys, "launch")
    assert "no job nosuch: neither nosuch nor jobs/nosuch holds" in refused(capsys, "launch", "--job", "nosuch")
    assert "trainers is -1" in refused(capsys, "launch", "--trainers", "-1", "--job", "nosuch")
    assert list(tmp_path.iterdir()) == []


def test_launch_runs_the_script_with_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setenv("GRAPHFT_LAUNCH", "")
    (tmp_path / "launched_helper.py").write_text("NAME = 'helped'\n")
    (tmp_path / "script.py").write_text(
        "import sys, launched_helper\nfrom graphft.runtime.launcher.options import choose_options\n"
        "assert __name__ == '__main__'\nprint(launched_helper.NAME, sys.argv, choose_options(None, {}))\n"
    )
    arguments = ["--trainers", "3", "--coordinators", "2", "--etcd", "h:1", "--job", "d"]
    arguments += ["--max-restarts", "7", "--quiet", "--no-fork-server"]
    script = [str(tmp_path / "script.py"), "--fresh", "--trainers=9", "--lr", "1"]
    assert main(["launch", *arguments, *script]) == 2
    text, err = capsys.readouterr()
    options = LaunchOptions(3, None, 2, "h:1", "d", 7, quiet=True, fork_server=False)
    assert text == f"helped {script} {options}\n"
    assert f"--fresh, --trainers=9 stands behind {script[0]}, and is given to it" in err
    assert "script.py ended and never called job.run(): nothing was run" in err
    given = {"trainers", "coordinators", "etcd", "job_dir", "max_restarts", "quiet", "fork_server"}
    assert json.loads(os.environ["GRAPHFT_LAUNCH"]).keys() == given, "what was not given is the script's to say"


def test_options_have_their_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", "job", "f.pt2", "--bes"])
    assert ended.value.code == 2
    assert "--bes" in capsys.readouterr().err.splitlines()[-1]
