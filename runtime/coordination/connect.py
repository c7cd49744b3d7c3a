"""The way to a job's etcd: endpoints, login and certificates."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from graphft.disk.fileio import write_atomically
from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_files import is_complete
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd, EtcdUnreachable
from graphft.runtime.etcd.client import open_etcd

log = logging.getLogger("graphft")

ANSWER_SECONDS = 5.0
"""For how long etcd may not answer at first, ..."""
WAIT_SECONDS = 60.0
"""... and for how long a role waits for one that does not answer, or whose endpoints its launcher has not left."""
NOTE = "etcd.json"
"""In the run's folder: where its etcd is."""


class EtcdNote(msgspec.Struct, frozen=True):
    """Says where a run's etcd is. `endpoints`: "" if none are known. `own`: it was started with the job, and ends with
    its launcher."""

    endpoints: str = ""
    own: bool = False


class JobEnded(GraphftError):
    """The job is complete, and the etcd that it brought along has ended."""


def connect(endpoints: str, wait: float | None = None, environ: Mapping[str, str] = os.environ) -> Etcd:
    """Returns a client of `host:port[,host:port...]`, once etcd has answered. Raises EtcdUnreachable after `wait`
    seconds."""
    etcd = open_etcd([e.strip() for e in endpoints.split(",")], environ)
    try:
        etcd.ping(ANSWER_SECONDS if wait is None else wait)
    except BaseException:
        etcd.close()
        raise
    return etcd


def connect_role(job_dir: Path, endpoints: str = "", wait: float = WAIT_SECONDS) -> Etcd:
    """Returns a client for a role, once etcd has answered; without `endpoints`, of the one that its launcher notes in
    the folder. Raises JobEnded when the job is complete already; EtcdUnreachable, GraphftError[etcd-endpoints] after
    `wait` seconds."""
    end = time.monotonic() + wait
    while True:
        known = endpoints or read_note(job_dir).endpoints
        missing = GraphftError(
            f"no etcd endpoints: none were given, and {job_dir / NOTE} is not there",
            rule="etcd-endpoints",
            help="give --etcd HOST:PORT[,...] or set GRAPHFT_ETCD",
        )
        try:
            if not known:
                raise missing
            return connect(known, wait=1.0)
        except GraphftError as error:
            if error is not missing and not isinstance(error, EtcdUnreachable):
                raise
            if known and is_complete(job_dir):
                raise JobEnded(f"the job in {job_dir} is complete", rule="job-complete") from error
            if time.monotonic() > end:
                raise
            log.debug("waiting for etcd: %s", error.message)
        time.sleep(0.1)


def write_endpoints(job_dir: Path, endpoints: str, *, own: bool = False) -> None:
    """Notes in the run's folder where its etcd is. Raises OSError."""
    write_atomically(job_dir / NOTE, msgspec.json.encode(EtcdNote(endpoints, own)))


def read_note(job_dir: Path) -> EtcdNote:
    """Returns the note there; an empty one if it is damaged: the next launcher writes it anew."""
    path = job_dir / NOTE
    try:
        return msgspec.json.decode(path.read_bytes(), type=EtcdNote)
    except FileNotFoundError:
        return EtcdNote()
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        log.warning("%s is damaged: %s", path, error)
        return EtcdNote()


def check_note(job_dir: Path, keys: Keys, run: str, etcd: Etcd | None) -> None:
    """Raises UsageError[etcd-endpoints] if the folder names another etcd, and `etcd` (None: one that will be started)
    does not know the run: two would write to one folder of checkpoints."""
    note = read_note(job_dir)
    if not note.endpoints or note.own:  # the one that a launcher started is gone with it
        return
    if etcd is not None:
        known = etcd.get(keys.run)
        if (known is not None and known.value.decode() == run) or set(etcd.endpoints) & set(note.endpoints.split(",")):
            return
    raise UsageError(
        f"{job_dir / NOTE} says that this run is in the etcd {note.endpoints}, and no other one knows it",
        rule="etcd-endpoints",
        help=f"give --etcd {note.endpoints}; or, when all processes of the run have ended, delete {job_dir / NOTE}: "
        "then it goes on from its newest checkpoint",
    )


def note_etcd(job_dir: Path, etcd: Etcd) -> None:
    """Notes the etcd of a run that has been recorded there, if none is noted and the folder takes a note."""
    if not read_note(job_dir).endpoints:
        with contextlib.suppress(OSError):
            write_endpoints(job_dir, ",".join(etcd.endpoints))
