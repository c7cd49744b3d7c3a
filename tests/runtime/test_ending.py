"""How a launch ends that does not complete: its words, its status, and what a script can catch."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher import callback_observer, ending, launch
from graphft.runtime.launcher.callback_observer import CallbackObserver
from graphft.runtime.launcher.ending import Interrupted, Reached, interruptible
from graphft.runtime.launcher.process_ends import read_ends
from graphft.runtime.process.folder_lock import locked
from graphft.transpiler import Job
from tests.support.programs_by_hand import linear
from tests.support.scripts import run


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_ends_in_order_with_one_line_and_its_status(name: str, status: int) -> None:
    done = run(
        "import os, signal\n"
        "from graphft.runtime.launcher.ending import interruptible\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what a shell starts behind & ignores it
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # so does nohup
        "with interruptible(lambda: 'interrupted at step 3'):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "        signal.pause()\n"
        "    finally:\n"
        "        print('etcd has ended')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "etcd has ended\n", "interrupted at step 3\n")


def test_a_handler_that_a_callback_sets_stays() -> None:
    """Whoever stops after the epoch at the first Ctrl-C sets it in `on_begin`: it was taken away with the block."""
    done = run(
        "import signal\n"
        "from graphft.runtime.launcher.ending import interruptible\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for n in range(2):\n"
        "    with interruptible(lambda: 'interrupted'):\n"
        "        if n == 0:\n"
        "            signal.signal(signal.SIGINT, lambda *_: print('after this epoch'))\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "signal.raise_signal(signal.SIGINT)\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, 3 * "after this epoch\n" + "True\n", "")


@pytest.mark.parametrize(
    ("before", "ends"),
    [("lambda *_: print('as before')", (0, "as before\n")), ("signal.SIG_DFL", (-signal.SIGTERM, ""))],
)
def test_a_blocks_handler_that_is_set_again_later_is_the_one_before_it(before: str, ends: tuple[int, str]) -> None:
    """A callback sets its own in `on_begin`, keeps the one that was there, and gives it back in `on_end`."""
    done = run(
        "import signal\n"
        "from graphft.runtime.launcher.ending import interruptible\n"
        f"signal.signal(signal.SIGTERM, {before})\n"
        "with interruptible(lambda: 'interrupted'):\n"
        "    kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, kept)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (*ends, "")


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    done = run(
        "import runpy, sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'graphft.runtime.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "runpy.run_module('graphft', run_name='__main__')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_script_can_catch_it_as_a_keyboard_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as caught, interruptible(lambda: "interrupted"):
        raise KeyboardInterrupt
    assert isinstance(caught.value, Interrupted)
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("debug", "traceback"), [("", False), ("1", True)])
def test_an_error_of_a_launch_is_a_message_without_a_traceback(debug: str, traceback: bool) -> None:
    done = run(
        "from graphft.errors import UsageError, without_traceback\n"
        "try:\n"
        "    raise UsageError('no usable etcd was found', rule='etcd-missing', help='install it')\n"
        "except UsageError as error:\n"
        "    without_traceback(error)\n"
        "    raise\n",
        GRAPHFT_DEBUG=debug,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("error[etcd-missing]: no usable etcd was found\nhelp: install it\n")
    assert ("Traceback" in done.stderr) == traceback


def test_of_two_errors_the_second_one_is_a_message_as_well() -> None:
    done = run(
        "from graphft.errors import UsageError, without_traceback\n"
        "without_traceback(UsageError('caught by the script'))\n"
        "error = UsageError('not caught')\n"
        "without_traceback(error)\n"
        "raise error\n"
    )
    assert "Traceback" not in done.stderr
    assert "not caught" in done.stderr


def test_errors_of_the_script_keep_their_traceback() -> None:
    done = run(
        "from graphft.errors import UsageError, without_traceback\n"
        "without_traceback(UsageError('caught by the script'))\n"
        "raise ValueError('mine')\n"
    )
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ValueError: mine\n")


def test_the_last_words(job: Job, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "WORDS_SECONDS", 120.0)
    reached = Reached(saved, job.config)
    assert reached.describe() == f"interrupted; run again to resume {saved}"
    (saved / "checkpoints").mkdir()
    reached.status = JobStatus("j", "running", {}, 0, 0, 3, None)
    assert reached.describe() == f"interrupted at step 3 of 4; run again to resume {saved} at step 0 of 4"
    keep = CheckpointStore(saved / "checkpoints")
    keep.write_manifest(Manifest(0, 4, "run", (keep.write_part(0, 4, 0, 1, {"w": torch.zeros(1)}),)))
    assert reached.describe() == f"interrupted at step 4 of 4; run again to resume {saved} at step 4 of 4", "newer"
    plain = Reached(saved, job.config.replace(ft=False), reached.status)
    assert plain.describe().startswith("interrupted at step 3 of 4; without fault tolerance (ft=False)")
    (saved / "model.safetensors").touch()
    assert reached.describe() == f"interrupted at step 4 of 4; {saved} is complete"


def test_the_last_words_do_not_wait_for_a_storage_that_hangs(
    job: Job, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C took half a minute where the storage refused connections, and minutes where it did not answer."""
    answers = threading.Event()

    def asks(*arguments: object) -> bool:
        return answers.wait(120)

    monkeypatch.setattr(ending, "is_complete", asks)
    monkeypatch.setattr(ending, "WORDS_SECONDS", 0.1)
    reached = Reached(saved, job.config, JobStatus("j", "running", {}, 0, 0, 3, None))
    with pytest.raises(Interrupted), interruptible(reached.describe):
        raise KeyboardInterrupt
    answers.set()
    assert capsys.readouterr().err == f"interrupted at step 3 of 4; run again to resume {saved}\n"


@pytest.mark.parametrize("answers", [threading.Event(), None])
def test_a_storage_that_does_not_answer_hides_no_error_of_a_callback(
    answers: threading.Event | None,
    job: Job,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The callback's error ended with that of the storage, after minutes."""

    def asks(*arguments: object) -> bool:
        if answers is None:
            raise OSError("no route to host")
        return not answers.wait(120)

    for module in (ending, callback_observer):
        monkeypatch.setattr(module, "is_complete", asks)
        monkeypatch.setattr(module, "WORDS_SECONDS", 0.1)
    with pytest.raises(ValueError, match="no such figure"), CallbackObserver(Callbacks(()), job, saved, None):
        raise ValueError("no such figure")
    if answers is not None:
        answers.set()
    assert capsys.readouterr().err == f"ValueError has ended the launch; run again to resume {saved}\n"


def test_a_second_signal_while_the_last_words_are_looked_for() -> None:
    def again() -> str:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught, interruptible(again):
        raise KeyboardInterrupt
    assert caught.value.code == 130


def test_a_script_that_runs_its_job_when_it_is_imported_is_told_of_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers import a script for the Dataset in it: each would start a job of its own."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("GRAPHFT_CALLED", "")
    script = tmp_path / "unguarded.py"
    script.write_text("from graphft.runtime.launcher.launch import run_job\n\nrun_job(None)\n\n\ndef make(): ...\n")
    with pytest.raises(GraphftError, match=r"unguarded\.py calls job\.run\(\) when it is imported") as caught:
        graphft.dataset(f"{script}:make")
    assert caught.value.rule == "main-guard"
    assert "if __name__ == '__main__':" in caught.value.help


def test_a_dataset_of_a_notebook_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells are functions of a module without a file."""

    def make() -> list[int]:
        return [1]

    monkeypatch.setattr(make, "__qualname__", "make")
    monkeypatch.setattr(make, "__module__", "notebook")
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    with pytest.raises(GraphftError, match="cannot be found again by another process") as caught:
        graphft.dataset(make)
    assert "notebook" in caught.value.help


def test_a_launch_that_saves_its_job_can_be_interrupted(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large data take a while: Ctrl-C had a traceback then."""

    def saves(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(launch, "open_run", saves)
    with pytest.raises(Interrupted) as caught:
        launch.run_job(job)
    assert caught.value.code == 143
    assert capsys.readouterr().err == "interrupted before the job was started; run again\n"


def test_a_launcher_that_waits_for_another_can_be_interrupted(tmp_path: Path) -> None:
    with locked(tmp_path):
        done = run(
            "import os, signal, threading\n"
            "from pathlib import Path\n"
            "from graphft.runtime.launcher.ending import interruptible\n"
            "from graphft.runtime.process.folder_lock import locked\n"
            "later = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))\n"
            f"with interruptible(lambda: 'interrupted'), locked(Path({str(tmp_path)!r}), lambda _: later.start()):\n"
            "    print('it has the folder')\n"
        )
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "interrupted\n")


def test_a_launch_that_is_interrupted_while_it_starts_counts(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`graphft runs` said 0 launches of a run that was to be resumed."""

    def starts(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch._Launch, "_start_etcd_and_engine", starts)
    for count in (1, 2):
        with pytest.raises(Interrupted):
            launch.run_job(job, job_dir=str(tmp_path / "run"))
        assert read_ends(tmp_path / "run").launches == count


def test_a_signal_that_comes_while_the_last_callbacks_are_told_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launch is over by then: SIGTERM ended the script without a word, Ctrl-C with a traceback."""

    class Slow:
        def on_end(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    data = graphft.arrays(x=torch.zeros(8, 200), y=torch.zeros(8, 1), chunk_size=4)
    job = graphft.transpile(linear(), data=data, batch_size=4, ft=True)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody heard of it"))
    try:
        with pytest.raises(Interrupted):
            job.run(job_dir=str(tmp_path / "run"), quiet=True, callbacks=[Slow()])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.endswith(f"interrupted; {tmp_path / 'run'} is complete\n{NOT_TOLD}")


NOT_TOLD = "callbacks were NOT told of all of it: an epoch, a validation, or on_end\n"


@pytest.mark.parametrize(
    ("when", "state"), [("on_status", "run again to resume {0}"), ("on_end", "{0} is complete\n" + NOT_TOLD)]
)
def test_where_a_job_is_that_a_callback_has_ended_with_its_exception(
    tmp_path: Path, when: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C said so, a ValueError did not; and of a job that was complete meanwhile nobody knew."""

    class Broken: ...

    def fail(*_: object) -> None:
        raise ValueError("no such figure")

    setattr(Broken, when, fail)
    data = graphft.arrays(x=torch.zeros(400, 200), y=torch.zeros(400, 1), chunk_size=40)
    job = graphft.transpile(linear(), data=data, batch_size=4, epochs=1 if when == "on_end" else 1000, ft=True)
    with pytest.raises(ValueError, match="no such figure"):
        job.run(job_dir=str(tmp_path / "run"), quiet=True, callbacks=[Broken()])
    said = capsys.readouterr().err
    assert f"ValueError has ended the launch; {state.format(tmp_path / 'run')}" in said
    assert (NOT_TOLD in said) == (when == "on_end")
