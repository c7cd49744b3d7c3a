"""One launcher at a time works in a job's folder, where it has files that it may delete or an etcd of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from graphft.errors import UsageError

_FILE = "launcher.lock"


@contextlib.contextmanager
def locked(job_dir: Path) -> Iterator[None]:
    """Holds the folder. The kernel lets go of it when this process ends, however that happens.

    Raises GraphftError[job-running] while another process holds it.
    """
    job_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(job_dir / _FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise UsageError(
                f"the job in {job_dir} is being run by {holder}",
                rule="job-running",
                help=f"wait for its end, or stop it; `graphft status --job {job_dir}` shows where it is",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
