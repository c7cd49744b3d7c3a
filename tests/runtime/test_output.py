"""A launcher whose terminal takes no output looks after its job all the same."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.output import PARTS, output_of
from tests.support.waiting import until


@pytest.fixture
def full() -> tuple[int, int]:
    """A pipe that takes nothing more."""
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(sink, b"." * 4096)
    os.set_blocking(sink, True)
    return source, sink


def test_nobody_waits_for_output_that_is_stuck(full: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = full
    with os.fdopen(sink, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        for number in range(PARTS + 50):  # each of which would wait for ever
            tell(f"line {number}")
        read = b""
        while f"line {PARTS + 49}\n".encode() not in read:
            read += os.read(source, 1 << 16)
        lines = read.decode().lstrip(".").splitlines()
        assert len(lines) <= PARTS + 1
        assert lines[-1] == f"line {PARTS + 49}", "the newest are kept"
    os.close(source)


def test_output_comes_in_order(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        stream.write("first\n")
        output = output_of(stream)
        threads = threading.active_count()
        for number in range(3):
            print(number, file=output, flush=True)
        until(lambda: (tmp_path / "out").read_text().split() == ["first", "0", "1", "2"])
        assert output_of(stream) is output
        until(lambda: threading.active_count() == threads)


def test_a_full_disk_is_nobodys_error() -> None:
    with open("/dev/full", "w") as stream:
        print("lost", file=output_of(stream), flush=True)
