"""Roles leave processes behind, which this one adopts."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from graphft.runtime.launcher.child import ChildProcesses
from graphft.runtime.process.identity import identify
from tests.support.waiting import until

ROLE = """
import os, signal, sys, threading
def have():
    child = os.fork()
    if not child:
        os.close(1)
        os.read(0, 1) if sys.argv[1] == "ends" else signal.pause()
        os._exit(0)
    print(child, flush=True)
    signal.pause()
threading.Thread(target=have, daemon=True).start()
signal.pause()
"""


@pytest.mark.parametrize("child", ["ends", "lives"])
def test_what_a_killed_role_leaves_is_ended_and_collected(child: str) -> None:
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as a launcher does
    child_processes = ChildProcesses()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", ROLE, child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as role:
        assert role.stdout is not None
        left = int(role.stdout.readline())
        child_processes.look([identify(role.pid)])
        child_processes.look([])
        assert psutil.pid_exists(left), "its parent lives"
        role.kill()
    assert psutil.pid_exists(left), "as a zombie, or alive"
    until(lambda: child_processes.look([]) or not psutil.pid_exists(left))


def test_children_of_its_own_are_left_alone() -> None:
    child_processes = ChildProcesses()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.native_id is not None
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as other:
        # A dead role's process id may have become a thread's of this process.
        child_processes.look([identify(thread.native_id), identify(other.pid)])
        child_processes.look([])
        ended.set()
        thread.join()
        assert psutil.Process(other.pid).is_running()
        other.terminate()
        child_processes.look([identify(other.pid)])
        assert other.wait(120) == -signal.SIGTERM
