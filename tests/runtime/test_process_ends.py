"""The file of what became of a run's processes."""

from __future__ import annotations

from pathlib import Path

from graphft.runtime.launcher.process_ends import ProcessEnds, note, read_ends
from graphft.runtime.launcher.result import Result


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
