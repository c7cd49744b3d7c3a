"""The fork server's own process (`local.py`): what it imports here, and the job that it loads, its forks have."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import graphft.runtime.roles.coordinator.coordinator
import graphft.runtime.roles.pserver.pserver
import graphft.runtime.roles.trainer.slot_trainer  # noqa: F401  (that they are loaded is the point)
from graphft.runtime.process.role_process import EXIT_OK, die_with_parent
from graphft.runtime.roles.environment import RoleSpec, run_role
from graphft.transpiler.job import Job

_PR_SET_NAME = 15


def serve(options: argparse.Namespace) -> int:
    """Loads the job, and makes roles. In each of them it returns the role's exit status."""
    launcher, answers = os.getppid(), os.dup(1)
    os.setpgid(0, 0)
    os.dup2(2, 1)
    torch.set_num_threads(1)  # a pool that loading the job starts would not survive the fork
    job_dir: Path = options.job
    job = Job.load(job_dir)
    gc.collect()
    gc.freeze()  # or each role's first collection would write to every page, and share none
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if _fork(launcher):
            os.write(answers, b"%d %d\n" % (order["id"], os.getpid()))
            _become(order, answers, launcher)
            return run_role(job, job_dir, RoleSpec(order["role"], order["index"], str(job_dir), order["etcd"]))
    return EXIT_OK  # the launcher has ended


def _fork(launcher: int) -> bool:
    """Makes a child of the launcher. Returns whether this is the child."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"cannot fork with {threads} threads")
    between = os.fork()
    if between:
        os.waitpid(between, 0)  # from here on its child is the launcher's
        return False
    between = os.getpid()
    if os.fork():
        os._exit(EXIT_OK)
    while os.getppid() == between:
        time.sleep(0.0005)
    die_with_parent(launcher)
    return True


def _become(order: Mapping[str, Any], answers: int, launcher: int) -> None:
    os.close(answers)
    try:
        os.setpgid(0, os.getpgid(launcher))  # as any child of the launcher: Ctrl-C reaches it, too
    except OSError:
        os.setpgid(0, 0)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, stream)
    name = f"{order['role']} {order['index']}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)  # what top and ps show
