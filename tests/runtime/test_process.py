"""Role processes: they end with their parent, say why they cannot start, and their exit statuses are read right."""

from __future__ import annotations

import inspect
import queue as queues
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from graphft.runtime.launcher.process_ends import ProcessEnds, note, read_ends
from graphft.runtime.launcher.result import Result
from graphft.runtime.process.role_process import describe_exit, manner, start_role, was_preempted


def test_a_child_whose_parent_died_before_it_could_say_so() -> None:
    code = "from graphft.runtime.process.role_process import die_with_parent; die_with_parent(1 << 22); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_child_finds_modules_where_its_parent_does(tmp_path: Path) -> None:
    """Modules beside the script are found, and not those of the folder that it was started in."""
    script, start = tmp_path / "src" / "train.py", tmp_path / "start"
    for folder in (script.parent, start):
        folder.mkdir()
        for name in ("helper", "queue"):
            (folder / f"{name}.py").write_text("")
    (script.parent / "queue.py").unlink()
    child = "import graphft.__main__, helper, queue; print(helper.__file__, queue.__file__)"
    script.write_text(
        "import os, subprocess\n"
        "from graphft.runtime.process.role_process import module_paths, python\n"
        "open(os.path.join(os.path.dirname(__file__), 'types.py'), 'w').close()\n"  # this process has its own already
        f"command = [*python()[:-2], '-c', {child!r}]\n"
        "subprocess.run(command, env={**os.environ, **module_paths()}, check=True)\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=start, capture_output=True, text=True, timeout=120)
    helper, queue = done.stdout.split()
    assert (helper, queue) == (str(script.parent / "helper.py"), inspect.getfile(queues)), done.stderr


def test_a_role_that_cannot_start_says_why_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "trainer-0.log"
    process = start_role(
        ["trainer", "--job", str(tmp_path / "nosuch"), "--etcd", "127.0.0.1:1", "--index", "0"],
        log,
        {"OMP_NUM_THREADS": "1"},
    )
    assert process.wait(120) == 2
    text = log.read_text()
    assert "error[job-directory]" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("status", "preempted", "words"),
    [
        (0, False, "exit status 0, before the job was over"),
        (1, False, "exit status 1"),
        (2, False, "exit status 2"),
        (75, True, "lease or etcd lost"),
        (-9, True, "killed by SIGKILL"),
        (-15, True, "killed by SIGTERM"),
        (-2, True, "killed by SIGINT"),
        (-11, False, "killed by SIGSEGV"),
        (-40, False, "killed by signal 40"),
    ],
)
def test_how_a_process_ended(status: int, preempted: bool, words: str) -> None:
    assert (was_preempted(status), describe_exit(status)) == (preempted, words)
    assert manner(status) == ("killed" if status == -signal.SIGKILL else "asked" if preempted else "crashed")


def test_ends_are_those_of_all_launches(tmp_path: Path) -> None:
    note(tmp_path, "launch")
    note(tmp_path, "preemption", "killed by SIGKILL", "trainer 0")
    note(tmp_path, "launch")
    note(tmp_path, "preemption", "killed by SIGKILL", "trainer 0")
    note(tmp_path, "failure", "status 1", "pserver 1")
    assert read_ends(tmp_path) == ProcessEnds(2, {"pserver 1": 1}, {"trainer 0": 2})
    assert "complete: 7 steps, 2 launches, the last took 1.0 s, 2 preemptions, 1 failures" in Result.of(
        tmp_path, 7, 1.0
    ).describe(1)


def test_what_cannot_be_read_or_written_ends_nothing(tmp_path: Path) -> None:
    assert not note(tmp_path / "nosuch", "launch")
    note(tmp_path, "launch")
    with (tmp_path / "ends.jsonl").open("ab") as file:
        file.write(b'{"kind": "fail\xff\n7\n{}\n{"kind": "failure"}\n')
    assert read_ends(tmp_path) == ProcessEnds(1)
    assert read_ends(tmp_path / "nosuch") == ProcessEnds()
