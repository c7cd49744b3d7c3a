"""The batch scripts that `graphft slurm` prints. Slurm itself is not needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import graphft
from graphft.runtime.cli import main
from graphft.runtime.engines.slurm_script import SlurmScript
from graphft.runtime.launcher.job_folder import begun
from tests.integration import training
from tests.support.commands import refused, shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "blobs"
    training.job(training.program()).save(folder)
    return folder


def options_of(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def assert_bash(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = shown(capsys, "slurm", folder)
    assert_bash(script)
    assert options_of(script) == [
        "--job-name=blobs",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        f"--output={folder}/logs/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        "--no-kill",
        "--signal=B:USR1@120",
    ]
    assert f"job={folder}\n" in script
    assert '--trainers "$((1 * SLURM_JOB_NUM_NODES))"' in script
    assert (folder / "logs").is_dir()  # where Slurm is to write
    (folder / "logs" / "slurm-12.log").touch()
    assert not begun(folder)


def test_no_limit_is_none_too_short(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit in ("0", "0:00", "0-0", "UNLIMITED"):
        assert f"--time={limit}" in options_of(shown(capsys, "slurm", folder, "--time", limit))


def test_what_it_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = ["--nodes", "2-8", "--trainers-per-node", "4", "--cpus-per-trainer", "6"]
    limits = ["--time", "1-00:00", "--partition", "gpu", "--signal-seconds", "300", "--sbatch=--account=lab"]
    script = shown(capsys, "slurm", folder, *counts, *limits, "--pservers", "2", "--etcd", "a:1,b:2")
    assert_bash(script)
    wanted = {"--nodes=2-8", "--ntasks-per-node=4", "--cpus-per-task=6", "--time=1-00:00"}
    assert wanted | {"--partition=gpu", "--signal=B:USR1@300"} < set(options_of(script))
    assert options_of(script)[-1] == "--account=lab"  # the last one counts
    assert " --pservers 2 --etcd a:1,b:2 " in script
    assert '--trainers "$((4 * SLURM_JOB_NUM_NODES))"' in script


def test_gpus() -> None:
    text = SlurmScript(job="/job", title="job", trainers_per_node=4, gpus=2).text()
    assert "--gpus-per-node=8" in options_of(text)


def test_a_job_that_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training.job(training.program()).save(tmp_path / "job")
    (tmp_path / "job" / "model.safetensors").touch()
    assert main(["slurm", str(tmp_path / "job")]) == 0
    assert "is complete: its processes would find nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        ("--signal-seconds", "100000"),
        ("--trainers-per-node", "9" * 20),
        ("--nodes", "9" * 20),
        ("--time", "9" * 17),
        ("--time", "١٠٠٠"),
    ],
)
def test_what_sbatch_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]) -> None:
    training.job(training.program()).save(tmp_path / "job")
    assert f"{option[0]} is " in refused(capsys, "slurm", tmp_path / "job", *option)


def test_processes_that_would_wait_for_ever_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training.job(training.program()).save(tmp_path / "job")
    for count in ("1", "3"):
        text = refused(capsys, "slurm", tmp_path / "job", "--pservers", count)
        assert f"pservers is {count}, but the job has 2" in text
    assert "--pservers 1" in shown(capsys, "slurm", tmp_path / "job", "--pservers", "1", "--etcd", "a:1,b:2")


@pytest.mark.parametrize("name", [training.__file__, training.__name__])
def test_a_dataset_of_this_machine_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    data = graphft.dataset(f"{name}:Blobs", chunk_size=training.CHUNK)
    job = graphft.transpile(training.program(), ft=True, chunks=data, batch_size=8, trainers=2, name="blobs")
    job.save(tmp_path / "job")
    assert main(["slurm", str(tmp_path / "job")]) == 0
    told = capsys.readouterr().err
    assert told.count("to be") == 1
    assert f"{name} is to be " in told
    assert "Blobs" in told


def test_a_script_has_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(sys.argv[1:] != ['--lr', '0.1', 'a $b'])")
    monkeypatch.chdir(tmp_path)
    script = shown(capsys, "slurm", "train.py", "--args=--lr 0.1 'a $b'")
    assert subprocess.run(["bash"], input=script, text=True, cwd="/").returncode == 0
    assert "expected words as a shell reads them" in refused(capsys, "slurm", "train.py", "--args='a")


def test_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Trainer, say: no job is saved. It is killed, and requeued, as a launcher is."""
    (tmp_path / "a script.py").write_text("import sys; sys.exit(7)")
    monkeypatch.chdir(tmp_path)
    script = shown(capsys, "slurm", "a script.py", "--nodes", "2", "--time", "10")
    assert_bash(script)
    assert {"--job-name=a-script", "--nodes=2", "--requeue", "--no-kill", "--signal=B:USR1@120"} < set(
        options_of(script)
    )
    assert 'GRAPHFT_ENGINE=slurm "$python" "$script" &' in script
    assert subprocess.run(["bash"], input=script, text=True, cwd="/").returncode == 7
    for option in (["--pservers", "2"], ["--join"], ["--etcd", "a:1"]):
        assert "is for a saved job" in refused(capsys, "slurm", "a script.py", *option)
    assert "there is no script" in refused(capsys, "slurm", "no.py")


def test_joining(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = shown(capsys, "slurm", folder, "--join", "--nodes", "2", "--etcd", "a:1")
    assert_bash(script)
    assert {"--job-name=blobs-join", "--nodes=2", "--signal=TERM@120"} < set(options_of(script))
    assert "etcd=a:1" in script
    assert "start trainer" in script


def test_a_job_in_a_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/stored"
    job = training.job(training.program(), storage=url)
    job.save(tmp_path / "jobs" / "stored")
    script = shown(capsys, "slurm", "jobs/stored")
    assert_bash(script)
    assert f"job={url}\n" in script
    assert "no common folder" in refused(capsys, "slurm", "jobs/stored", "--join")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nodes", "2-"), "--nodes is '2-'"),
        (("--nodes", "0"), "--nodes is '0'"),
        (("--sbatch=-t1",), "give it as --time of this command"),
        (("--sbatch=--time=1",), "give it as --time of this command"),
        (("--sbatch=--signal=USR1@1",), "give it as --signal-seconds of this command"),
        (("--trainers-per-node", "0"), "--trainers-per-node is 0, expected 1 or more"),
        (("--gpus-per-trainer", "-1"), "--gpus-per-trainer is -1, expected 0 or more"),
        (("--sbatch", "account"), "--sbatch is 'account'"),
        (("--sbatch=--account=lab\nrm",), "--sbatch is '--account=lab\\nrm', expected one line"),
        (("--time", "1:00\nrm"), "--time is '1:00\\nrm', expected one line"),
        (("--partition", "gpu\rrm"), "--partition is 'gpu\\rrm', expected one line"),
        (("--etcd", "a:1\n"), "--etcd is 'a:1\\n', expected one line"),
        (("--nodes", "8-2"), "--nodes is '8-2', expected N or N-M, N not above M"),
        (("--nodes", "1\u0663"), "--nodes is '1\u0663'"),
        (("--nodes", "2", "--etcd", "a:1,127.0.0.1:2379"), "etcd at 127.0.0.1:2379 is out of reach"),
        (("--nodes", "1-4", "--etcd", "http://localhost:2379"), "etcd at http://localhost:2379 is out of reach"),
        (("--join", "--etcd", "[::1]:2379"), "etcd at [::1]:2379 is out of reach"),
        (("--etcd", ","), "'' is not an etcd endpoint"),
        (("--gpus-per-trainer", "1"), '--gpus-per-trainer is 1, and job blobs runs on device "cpu"'),
        (("--time", "5min"), "--time is '5min', expected minutes,"),
        (("--time", "2"), "--time 2 is 120 s, and it drains 120 s before its end"),
        (("--time", "0-1:30", "--signal-seconds", "2700"), "--time 0-1:30 is 5400 s"),
        (("--args", "--lr 1"), "--args is for a script"),
    ],
)
def test_what_cannot_be(options: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, "slurm", folder, *options)


def test_etcd_of_the_only_node_may_be_on_loopback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert " --etcd 127.0.0.1:2379 " in shown(capsys, "slurm", folder, "--etcd", "127.0.0.1:2379")


def test_a_job_that_names_an_etcd_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training.job(training.program(), etcd_endpoints="localhost:2379").save(tmp_path / "job")
    assert "etcd at localhost:2379 is out of reach" in refused(capsys, "slurm", tmp_path / "job", "--nodes", "2")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("two words", '"--output={at}/two words/logs/slurm-%j.log"'),
        ("100%j", "--output={at}/100%%j/logs/slurm-%j.log"),
        ("it's #1", r'''"--output={at}/it\'s \#1/logs/slurm-%j.log"'''),
    ],
)
def test_folders_as_sbatch_reads_them(
    name: str, read: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It splits lines of #SBATCH at blanks, and replaces what begins with `%` in names of files."""
    moved = shutil.copytree(folder, tmp_path / name)
    shutil.rmtree(moved / "logs", ignore_errors=True)
    script = shown(capsys, "slurm", moved)
    assert_bash(script)
    assert read.format(at=tmp_path) in options_of(script)
    assert (moved / "logs").is_dir()


@pytest.mark.parametrize(
    ("name", "said"), [("a\nrm", "expected one line"), ("a\\b", "expected a path without a backslash")]
)
def test_folders_that_sbatch_cannot_read(
    name: str,
    said: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = shutil.copytree(folder, tmp_path / name)
    assert said in refused(capsys, "slurm", moved)
    monkeypatch.chdir(moved)
    assert said in refused(capsys, "slurm", ".")


def test_the_comment_stays_one_line() -> None:
    script = SlurmScript("/jobs/a", "a", written_by="graphft slurm 'a\nrm -r b\r\u2028'").text()
    assert script.splitlines()[1] == r"# graphft slurm 'a\nrm -r b\r\u2028'"


def test_there_is_no_such_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no folder" in refused(capsys, "slurm", tmp_path / "nothing")
