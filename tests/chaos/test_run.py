"""`graphft chaos` on a script of the user's, with all its real parts; and a job that hangs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft.runtime.chaos.experiment import Prepared, prepare, save_script
from graphft.runtime.chaos.faults import Fault
from graphft.runtime.chaos.host import Host
from graphft.runtime.chaos.run import ChaosOptions, Recovery, Report, Run
from graphft.runtime.cli import main
from graphft.runtime.process.role_process import EXIT_OK, EXIT_USAGE
from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer
from graphft.runtime.roles.trainer.state import TrainerState
from graphft.runtime.transport import ZmqClient
from tests.integration import training
from tests.integration.plays import SCRIPT, Pace
from tests.integration.training import LOOKED
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture
def suffers(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job waits for its faults: it goes on only while it is looked at, until the last one."""
    pace, look = Pace(workplace / "pace"), Run.look

    def noted(run: Run) -> None:
        look(run)
        pace.file.with_suffix(LOOKED).touch() if run.left else pace.set(0)

    monkeypatch.setattr(Run, "look", noted)
    yield
    pace.set(0)


def save_job(workplace: Path, folder: str, **options: object) -> Path:
    pace = Pace(workplace / "pace")
    pace.set(0)
    save_script(str(SCRIPT), [str(pace.file), json.dumps(options)], workplace / folder)
    return workplace / folder


@pytest.fixture(scope="module")
def prepared(workplace: Path) -> Prepared:
    """The job, and an undisturbed run of it."""
    return prepare(save_job(workplace, "job", trainers=2, epochs=16), workplace, patience=120)


@pytest.mark.slow
@pytest.mark.usefixtures("suffers")
def test_a_job_survives_and_ends_with_the_same_bits(
    prepared: Prepared, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("kill-trainer", "kill-pserver", "kill-etcd", "pause-trainer")
    command = ["chaos", "--job", str(prepared.reference), "--dir", str(workplace / "a"), "--faults", "4", "--seed", "5"]
    command += ["--kinds", ",".join(kinds)]
    status = main(command)
    shown = capsys.readouterr().out
    assert status == EXIT_OK, shown
    assert "4 of 4 faults" in shown
    assert all(kind in shown for kind in kinds)
    assert "bit-identical: yes" in shown
    assert not (workplace / "a").exists(), "nothing went wrong, and --keep was not given"


@pytest.mark.slow
def test_a_job_that_hangs_is_reported_with_its_stories(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    tell, log = Host.tell_stories, prepared.folder / "logs" / "trainer-0.log"

    def tell_and_wait(host: Host) -> None:
        tell(host)
        until(lambda: "asked for its story" in log.read_text())

    monkeypatch.setattr(Host, "tell_stories", tell_and_wait)
    faults = [Fault("pause-pserver", step=5, after=None, target=0.0, seconds=300.0)]
    report = Run(prepared.job, prepared.folder, ChaosOptions(patience=5.0), faults).play()
    assert not report.completed
    assert not report.ok
    assert "no progress for 5 s" in report.problem


@pytest.mark.slow
def test_what_cannot_be_done(prepared: Prepared, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*arguments: str) -> str:
        assert main(["chaos", "--dir", str(workplace / "b"), *arguments]) == EXIT_USAGE
        return capsys.readouterr().err

    assert "error[usage]" in fails()
    assert "error[chaos-kind]" in fails("--job", str(prepared.reference), "--kinds", "flood")
    assert "error[chaos-ft]" in fails("--job", str(save_job(workplace, "plain", ft=False)))
    broken = workplace / "broken.py"
    broken.write_text("raise SystemExit('no job today')")
    assert "no job today" in fails(str(broken))


def test_only_what_is_complete_and_identical_is_well() -> None:
    assert not Report("j", 0, 10, 0, completed=True, promise="bit-identical", different=["w: differs"]).ok
    assert not Report("j", 0, 10, 0, completed=True).ok, "nothing was compared"
    assert not Report("j", 0, 10, 0, promise="bit-identical").ok
    assert Report("j", 0, 10, 1, completed=True, promise="exactly once").ok


def test_a_recovery_is_over_two_steps_after_where_it_fell_back_to() -> None:
    fault = Recovery("kill-pserver", "", 14, at=1.0, since=1.5, gone=frozenset("b"))
    assert not fault.look(14, frozenset("ab"), 100, 2.0), "still the one that was killed"
    assert not fault.look(5, frozenset("ac"), 100, 2.1)
    assert not fault.look(6, frozenset("ac"), 100, 2.2), "the step in flight does not count"
    assert fault.look(7, frozenset("ac"), 100, 2.5)
    assert fault.seconds == 1.5
    late = Recovery("kill-trainer", "", 100, at=1.0, since=1.5)
    assert not late.look(100, frozenset(), 100, 1.4)
    assert late.look(100, frozenset(), 100, 1.6)


@pytest.mark.parametrize(
    ("step", "after", "due"), [(97, 2.0, True), (98, 2.0, False), (49, None, False), (50, None, True)]
)
def test_when_a_fault_is_due(tmp_path: Path, step: int, after: float | None, due: bool) -> None:
    """None comes to a job that is nearly through."""
    run = Run(training.job(training.program()), tmp_path, ChaosOptions(), steps=100)
    run.step, run._fired_at = step, 1.0
    fault = Fault("kill-job", step=50, after=after, target=0.0, seconds=1.0)
    assert run.due(fault, now=30.0) is due
    run.report.recoveries.append(Recovery("kill-pserver", "", 0, 29.0, 29.0))
    assert run.due(fault, now=30.0) is (due and after is not None)


def test_asking_a_trainer_to_leave_needs_no_lock_that_it_may_hold() -> None:
    """SIGTERM comes while the main thread sends: its handler must not wait for the lock that the thread holds."""
    trainer = SlotTrainer.__new__(SlotTrainer)
    trainer.transport, trainer.state = ZmqClient("t"), TrainerState()

    def asked() -> None:
        with trainer.transport._lock:
            trainer._leave()

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert trainer.state.leaving
    trainer.transport.close()
