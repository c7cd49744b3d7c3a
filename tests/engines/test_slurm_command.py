"""The batch scripts that `graphft slurm` prints. Slurm itself is not needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from graphft.runtime.launcher.run_folder import begun
from tests.integration import training
from tests.support.commands import refused, shown


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def script_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    script = shown(capsys, "slurm", *arguments)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    return script


def test_a_job(job_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(capsys, job_dir)
    assert options_of(script) == [
        "--job-name=blobs",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        f"--output={job_dir}/logs/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        "--no-kill",
        "--signal=B:USR1@120",
    ]
    assert f"job={job_dir}\n" in script
    assert '--trainers "$((1 * SLURM_JOB_NUM_NODES))"' in script
    assert (job_dir / "logs").is_dir()  # where Slurm is to write
    (job_dir / "logs" / "slurm-12.log").touch()
    assert not begun(job_dir)


def test_what_it_takes(job_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--nodes", "2-8", "--trainers-per-node", "4", "--cpus-per-trainer", "6"]
    limits = ["--time", "1-00:00", "--partition", "gpu"]
    script = script_of(capsys, job_dir, *counts, *limits, "--pservers", "2", "--etcd", "a:1,b:2")
    wanted = {"--nodes=2-8", "--ntasks-per-node=4", "--cpus-per-task=6", "--time=1-00:00", "--partition=gpu"}
    assert wanted < set(options_of(script))
    assert " --pservers 2 --etcd a:1,b:2 " in script
    assert '--trainers "$((4 * SLURM_JOB_NUM_NODES))"' in script


def test_a_script_has_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(sys.argv[1:] != ['--lr', '0.1', 'a $b'])")
    monkeypatch.chdir(tmp_path)
    script = script_of(capsys, "train.py", "--args=--lr 0.1 'a $b'")
    assert subprocess.run(["bash"], input=script, text=True, cwd="/").returncode == 0
    assert "expected words as a shell reads them" in refused(capsys, "slurm", "train.py", "--args='a")


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a script.py").write_text("import sys; sys.exit(7)")
    monkeypatch.chdir(tmp_path)
    script = script_of(capsys, "a script.py", "--nodes", "2", "--time", "10")
    assert {"--job-name=a-script", "--nodes=2", "--requeue", "--no-kill", "--signal=B:USR1@120"} < set(
        options_of(script)
    )
    assert 'GRAPHFT_ENGINE=slurm "$python" "$script" &' in script
    assert subprocess.run(["bash"], input=script, text=True, cwd="/").returncode == 7
    for option in (["--pservers", "2"], ["--etcd", "a:1"]):
        assert "is for a saved job" in refused(capsys, "slurm", "a script.py", *option)
    assert "there is no script" in refused(capsys, "slurm", "no.py")


def test_a_job_in_a_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/stored"
    job = training.job(training.program(), storage=url)
    job.save(tmp_path / "jobs" / "stored")
    script = script_of(capsys, "jobs/stored")
    assert f"job={url}\n" in script


@pytest.mark.parametrize(
    ("options", "rule"),
    [(("--nodes", "1-4", "--etcd", "http://localhost:2379"), "etcd-endpoints"), (("--args", "--lr 1"), "option")],
)
def test_what_cannot_be(options: tuple[str, ...], rule: str, job_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"[{rule}]" in refused(capsys, "slurm", job_dir, *options)


def test_folders_that_sbatch_cannot_read(job_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It splits lines of #SBATCH at blanks, and replaces what begins with `%` in names of files."""
    for name in ("two words", "100%j", "a\nrm", "a\\b"):
        assert "[option]" in refused(capsys, "slurm", shutil.copytree(job_dir, tmp_path / name))
