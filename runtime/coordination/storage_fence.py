"""Decides which launcher may write to a job's storage, where each brings an etcd of its own: the one that began last.

    <url>/launcher.json    of that launcher; each writes it when it begins

One that was cut off, or forgotten on another machine, finds another launcher there: its pservers commit no checkpoint
from then on, and it ends. Where all machines share an etcd, that decides, and no such file is looked at.
"""

from __future__ import annotations

import os
import posixpath
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from graphft.disk.fileio import read_regular, write_atomically
from graphft.runtime.coordination.job_storage import put_mark, read_mark, storage_of
from graphft.runtime.fs import file_system
from graphft.runtime.process.threads import within
from graphft.transpiler.record import RECORD

FILE = "launcher.json"
LOOK_SECONDS, ANSWER_SECONDS = 10.0, 5.0


class _Launcher(msgspec.Struct, frozen=True):
    token: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}"


def take_storage(job_dir: Path) -> None:
    """Makes this process the launcher that may write to the storage of the run in this folder, if it has one. Raises
    GraphftError[storage]."""
    if url := storage_of(job_dir):
        data = msgspec.json.encode(_Launcher(uuid.uuid4().hex, socket.gethostname(), os.getpid()))
        write_atomically(job_dir / FILE, data)
        put_mark(url, FILE, data)


def forget_launcher(job_dir: Path) -> None:
    """Deletes what an earlier launcher has left in the folder, for a run on an etcd that all machines share."""
    (job_dir / FILE).unlink(missing_ok=True)


def other_launcher(job_dir: Path) -> str:
    """Returns who may write to the storage instead of this folder's launcher; "" if that one may. Raises OSError if the
    storage is away (a file system that is not mounted is an empty folder), GraphftError[storage]."""
    url = storage_of(job_dir)
    try:
        mine = read_regular(job_dir / FILE) if url else b""
    except FileNotFoundError:
        return ""
    found = read_mark(url, FILE) if url else b""
    if found == mine:
        return ""
    fs, root = file_system(url)
    if found is None and fs.size(posixpath.join(root, RECORD)) is None:
        raise OSError(f"nothing of the job is in {url}: is its file system mounted?")
    try:
        return str(msgspec.json.decode(found or b"", type=_Launcher))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"a process that {url}/{FILE} does not name"


def check_launcher(job_dir: Path) -> None:
    """Raises OSError if another launcher has taken the storage after that of this job's processes."""
    if other := other_launcher(job_dir):
        raise OSError(f"{other} runs the job in this storage now: checkpoints of this machine do not count any more")


class StorageFence:
    """Looks now and then whether the storage is still this launcher's own. `fail`: is told why it is not."""

    def __init__(self, job_dir: Path, fail: Callable[[str], None]) -> None:
        self._job_dir, self._fail, self._next = job_dir, fail, 0.0

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        if other := within(ANSWER_SECONDS, lambda: other_launcher(self._job_dir), ""):  # "": also while it is away
            self._fail(f"{other} runs the job in {storage_of(self._job_dir)} now: of two launchers the newer one does")
