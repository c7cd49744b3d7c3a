"""Names a process, and says that it is dead only where it can be known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from graphft.runtime.process import identity as module
from graphft.runtime.process.identity import UNKNOWN, identify


def test_this_process_and_a_child() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    seen = identify(child.pid)
    assert seen != identify() == identify(os.getpid())
    assert (seen.visible, seen.dead, identify().dead) == (True, False, False)
    child.communicate(b"\n")
    assert (seen.visible, seen.dead) == (True, True)
    assert identify(child.pid) == UNKNOWN, "it is too late to see it"


@pytest.mark.parametrize(
    ("other", "dead"),
    [
        ({"started": 1}, True),
        ({"machine": "b"}, False),
        ({"namespaces": "pid:[1]"}, False),
        ({"pid": 1 << 22}, True),
        ({"machine": "b", "pid": 1 << 22}, False),
        ({"namespaces": "pid:[1]", "pid": 1 << 22}, False),
    ],
)
def test_what_is_known_of_another(other: dict[str, object], dead: bool) -> None:
    assert replace(identify(), **other).dead is dead


def test_processes_that_proc_hides_are_not_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alive = identify()
    monkeypatch.setattr(module, "_STAT", f"{tmp_path}/%d")
    assert (alive.visible, alive.dead) == (True, False)
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "none")
    assert (alive.visible, alive.dead) == (False, False)
    assert (identify(), identify().visible, identify().dead) == (UNKNOWN, False, False)
