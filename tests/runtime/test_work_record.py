"""A trainer's work can be read after its death, however it ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from msgspec.structs import replace

from graphft.runtime.process.identity import UNKNOWN, identify
from graphft.runtime.process.work_record import Note, Phase, Place, WorkRecord, read_note, record_path

A, B = Place(0, 3, 1), Place(1, 7, 1 << 40)


def test_what_was_noted_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    path = record_path(tmp_path, 4)
    code = f"""
import os, signal
from pathlib import Path
from graphft.runtime.process.work_record import Phase, Place, WorkRecord
record = WorkRecord(Path({str(path)!r}))
record.begin(Phase.COMPUTING, Place(*{tuple(A)}), 17)
record.ahead(Place(*{tuple(B)}))
os.write(1, b"noted")
os.read(0, 1)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = identify(process.pid)
    assert process.stdout is not None
    assert process.stdout.read(5) == b"noted"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert read_note(path, seen) == Note(Phase.COMPUTING, A, 17, B)
    assert read_note(path, replace(seen, started=1)) is None, "another process of that id"
    assert read_note(path, UNKNOWN) is None
    successor = WorkRecord(path)
    assert successor.before is not None
    assert successor.before.places
    assert read_note(path, identify()) == Note(Phase.IDLE, Place(0, 0, 0), 0, None)
    last = WorkRecord(path).before
    assert last is not None
    assert not last.places


def test_a_process_does_not_write_into_its_successors_file(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0"
    first, second = WorkRecord(path), WorkRecord(path)
    first.begin(Phase.COMPUTING, A)
    second.begin(Phase.READING, B, 5)
    assert read_note(path) == Note(Phase.READING, B, 5, None)
