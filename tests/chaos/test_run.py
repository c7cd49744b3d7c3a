"""`graphft chaos` on a script of the user's, with all its real parts; and a job that hangs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from graphft.runtime.chaos.fault_schedule import Fault
from graphft.runtime.chaos.host import Host
from graphft.runtime.chaos.prepare import Prepared, prepare, run_chaos, save_script
from graphft.runtime.chaos.recovery import Recovery
from graphft.runtime.chaos.report import Report
from graphft.runtime.chaos.run import ChaosOptions, Run
from graphft.runtime.cli import main
from graphft.runtime.process.role_process import EXIT_OK, EXIT_USAGE
from graphft.transpiler import Job
from tests.support.waiting import until

SCRIPT = """
import sys, torch, graphft

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
program = graphft.build(model, lambda model, x, y: ((model(x) - y) ** 2).mean(),
                        inputs={"x": ((None, 8), torch.float32), "y": ((None, 1), torch.float32)})
graphft.minimize(program, graphft.Adam(lr=1e-2))
data = graphft.dataset("tests.chaos.looked_at:Products", {"looked": sys.argv[2]}, chunk_size=64)
options = {"plain": {}, "ft": {"ft": True, "checkpoint_every": 25},
           "stops": {"ft": True, "validate": graphft.Validation(
               data=data, every=20, stop=graphft.EarlyStopping("loss", patience=5, min_delta=1e6))},
           "coordinator": {"ft": True, "checkpoint_every": 25, "dispatch": "coordinator", "lease_ttl": 60}}
job = graphft.transpile(program, trainers=2, pservers=2, sync=True, chunks=data, batch_size=16,
                        passes=16, name="products", **options[sys.argv[1]])
job.run()
print("a script goes on here, but not when it is only to save its job")
"""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture
def suffers(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job waits for its faults: it goes on only while it is looked at, until the last one."""
    file, look = workplace / "looked", Run._look

    def noted(run: Run) -> None:
        look(run)
        file.touch() if run.left else file.unlink(missing_ok=True)

    monkeypatch.setattr(Run, "_look", noted)
    yield
    file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def script(workplace: Path) -> Path:
    path = workplace / "products.py"
    path.write_text(SCRIPT)
    return path


def save_job(script: Path, options: str, folder: Path) -> None:
    save_script(str(script), [options, str(script.with_name("looked"))], folder)


@pytest.fixture(scope="module")
def prepared(workplace: Path, script: Path) -> Prepared:
    """The job, and an undisturbed run of it."""
    save_job(script, "ft", workplace / "job")
    return prepare(workplace / "job", workplace, patience=120)


@pytest.mark.usefixtures("suffers")
def test_a_job_survives_and_ends_with_the_same_bits(
    prepared: Prepared, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = workplace / "figures.json"
    kinds = "kill-trainer,kill-pserver,kill-etcd,add-trainer"
    status = main(
        [
            "chaos",
            "--job",
            str(prepared.reference),
            "--dir",
            str(workplace / "a"),
            "--faults",
            "4",
            "--seed",
            "5",
            "--kinds",
            kinds,
            "--json",
            str(figures),
        ]
    )
    shown = capsys.readouterr().out
    assert status == EXIT_OK, shown
    report = json.loads(figures.read_text())
    assert report["ok"] and report["completed"] and report["identical"]  # noqa: PT018
    assert report["process_faults"] == 4
    assert {"kill-trainer", "kill-pserver", "kill-etcd", "add-trainer"} <= report["faults"].keys()
    assert report["generations"] >= 2, "a pserver was killed"
    assert report["tensors_compared"] > 10
    assert "bit-identical  yes" in shown
    assert not (workplace / "a").exists(), "nothing went wrong, and --keep was not given"


@pytest.mark.usefixtures("suffers")
def test_a_job_survives_its_coordinators(workplace: Path, script: Path) -> None:
    """It is compared with the undisturbed run of the same job, which has coordinators as well. Leases outlive
    the restart of etcd, however busy the machine is; with this seed, the pause is short all the same."""
    save_job(script, "coordinator", workplace / "dispatched")
    prepared = prepare(workplace / "dispatched", workplace / "c", patience=120)
    kinds = ("kill-coordinator", "kill-coordinators", "pause-coordinator", "kill-etcd")
    report = run_chaos(prepared, ChaosOptions(faults=4, seed=79, kinds=kinds), lambda line: None)
    assert report.ok, report.problem
    assert report.faults.keys() == set(kinds)


def test_a_job_that_hangs_is_reported_with_its_stories(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, log = Host.tell_stories, prepared.folder / "logs" / "trainer-0.log"

    def tell_and_wait(host: Host) -> None:
        tell(host)
        until(lambda: "asked for its story" in log.read_text())

    monkeypatch.setattr(Host, "tell_stories", tell_and_wait)
    faults = [Fault("pause-pserver", step=5, after=None, target=0.0, seconds=300.0)]
    report = Run(prepared.job, prepared.folder, ChaosOptions(patience=5.0), faults, lambda line: None).play()
    assert not report.completed
    assert not report.ok
    assert "no progress for 5 s" in report.problem
    assert "asked for its story" in report.problem, "of the trainers, which wait"
    assert f"--- {log}" in report.problem


def test_what_cannot_be_done(
    prepared: Prepared, script: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: str) -> str:
        assert main(["chaos", "--dir", str(workplace / "b"), *arguments]) == EXIT_USAGE
        return capsys.readouterr().err

    assert "error[usage]" in fails()
    assert "error[chaos-kind]" in fails("--job", str(prepared.reference), "--kinds", "flood")
    assert "error[job-directory]" in fails("--job", str(workplace / "nowhere"))
    save_job(script, "plain", workplace / "plain")
    assert not Job.load(workplace / "plain").config.ft
    assert "error[chaos-ft]" in fails("--job", str(workplace / "plain"))
    broken = workplace / "broken.py"
    broken.write_text("raise SystemExit('no job today')")
    assert "no job today" in fails(str(broken))


def test_only_what_is_complete_and_identical_is_well() -> None:
    counters = Counter({"late-push": 1})
    report = Report("j", 0, 1, 10, 0, completed=True, identical=False, different=["w: differs"], counters=counters)
    assert not report.ok
    assert report.to_json()["faults"] == {"message-drop": 2}
    assert not Report("j", 0, 1, 10, 0, completed=True).ok, "nothing was compared"
    assert Report("j", 0, 1, 10, 1, completed=True, exactly_once=True).ok


def test_the_table_holds_what_the_figures_do() -> None:
    recoveries = [Recovery("kill-trainer", "0-a", 0.0, 5, 0, True, seconds=0.25)]
    report = Report(
        "j",
        0,
        1,
        10,
        2,
        recoveries,
        completed=True,
        identical=True,
        compared=3,
        steps_repeated=4,
        counters=Counter({"late-push": 1, "sent": 9}),
    )
    figures = report.to_json()
    assert report.ok
    assert figures["recovery_seconds"]["kill-trainer"] == {"count": 1, "median": 0.25, "p95": 0.25, "worst": 0.25}
    assert (figures["faults"], figures["steps_repeated"]) == ({"kill-trainer": 1}, 4)
    console = Console(record=True, width=120)
    console.print(report.render())
    shown = console.export_text()
    for line in (
        "j: 1 of 2 faults, seed 0",
        "kill-trainer │     1 │     0.25 │   0.25 │    0.25",
        "and 4 done again",
        "counted        1 late-push\n",
        "bit-identical  yes (3 tensors, 0 metrics)",
    ):
        assert line in shown
