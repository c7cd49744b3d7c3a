"""The way to a job's etcd: endpoints, login and certificates."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from graphft.disk.fileio import read_regular, write_atomically
from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_storage import is_complete
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd, EtcdUnreachable
from graphft.runtime.etcd.client import open_etcd

log = logging.getLogger("graphft")

ANSWER_SECONDS = 5.0
"""For how long etcd may not answer at first, ..."""
WAIT_SECONDS = 60.0
"""... and for how long a launcher may take to leave its endpoints in the job's folder. A role waits as long for
an etcd that does not answer."""
TELL_SECONDS = 2.0
"""A wait for it that is longer than this is told."""
NOTE = "etcd.json"
"""In the run's folder: where its etcd is."""


class EtcdNote(msgspec.Struct, frozen=True):
    """Says where a run's etcd is. `endpoints`: "" if none are known. `own`: it was started with the job, and ends with
    its launcher."""

    endpoints: str = ""
    own: bool = False


def connect(endpoints: str, wait: float | None = None, environ: Mapping[str, str] = os.environ) -> Etcd:
    """A client of `host:port[,host:port...]`, once etcd has answered. Login and certificates: as `open_etcd`.

    Raises EtcdUnreachable after `wait` (ANSWER_SECONDS) seconds.
    """
    etcd = open_etcd([e.strip() for e in endpoints.split(",")], environ)
    try:
        etcd.ping(ANSWER_SECONDS if wait is None else wait)
    except BaseException:
        etcd.close()
        raise
    return etcd


def connect_when_back(endpoints: str, job_dir: Path) -> Etcd:
    """`connect` for a role: it has loaded what it needs, so it waits for an etcd that is away, and goes on at once.

    Raises EtcdUnreachable after WAIT_SECONDS, or when the job is complete.
    """
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return connect(endpoints)
        except EtcdUnreachable as error:
            if time.monotonic() > end or is_complete(job_dir):
                raise
            log.warning("%s; waiting for it", error.message)


def write_endpoints(job_dir: Path, endpoints: str, *, own: bool = False) -> None:
    """Leaves in the run's folder where its etcd is. Raises OSError."""
    write_atomically(job_dir / NOTE, msgspec.json.encode(EtcdNote(endpoints, own)))


def read_note(job_dir: Path) -> EtcdNote:
    """Returns what was left there; nothing if it is damaged: the next launcher writes it anew."""
    path = job_dir / NOTE
    try:
        return msgspec.json.decode(read_regular(path), type=EtcdNote)
    except FileNotFoundError:
        return EtcdNote()
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        log.warning("%s is damaged: %s", path, error)
        return EtcdNote()


def read_endpoints(job_dir: Path) -> str:
    return read_note(job_dir).endpoints


def check_note(job_dir: Path, keys: Keys, run: str, etcd: Etcd | None) -> None:
    """Checks, before a process uses `etcd` (None: one that it will start), that the run is at work in no other one: two
    that know nothing of each other would write to one folder of checkpoints.

    Raises UsageError[etcd-endpoints] if the folder names another etcd, and `etcd` does not know the run.
    """
    note = read_note(job_dir)
    if not note.endpoints or note.own:  # the one that a launcher started is gone with it
        return
    known = etcd.get(keys.run) if etcd is not None else None
    if known is not None and known.value.decode() == run:
        return
    if etcd is None or not set(etcd.endpoints) & set(note.endpoints.split(",")):
        raise UsageError(
            f"{job_dir / NOTE} says that this run is in the etcd {note.endpoints}; "
            + (
                f"{', '.join(etcd.endpoints)} does not know it" if etcd is not None else "no other one is to be started"
            ),
            rule="etcd-endpoints",
            help=f"give --etcd {note.endpoints}; or, when all processes of the run have ended, delete "
            f"{job_dir / NOTE}: then it goes on from its newest checkpoint",
        )


def note_etcd(job_dir: Path, etcd: Etcd) -> None:
    """Notes the etcd of a run that has been recorded there, if none is noted. A folder that takes no note stays without
    one."""
    if not read_endpoints(job_dir):
        with contextlib.suppress(OSError):
            write_endpoints(job_dir, ",".join(etcd.endpoints))


class JobEnded(GraphftError):
    """The job is complete, and the etcd that it brought along has ended."""


def connect_from(job_dir: Path, wait: float | None = None) -> Etcd:
    """A client of the etcd whose endpoints its starter left in the folder. Waits for it; what an earlier run left
    there may be followed by something newer. Raises JobEnded when the job is complete already."""
    begun, told = time.monotonic(), False
    end = begun + (WAIT_SECONDS if wait is None else wait)
    while True:
        endpoints = read_endpoints(job_dir)
        if not told and time.monotonic() - begun > TELL_SECONDS:
            log.info(
                "waiting for etcd: %s",
                f"{endpoints}, which {job_dir / NOTE} names, does not answer"
                if endpoints
                else f"no --etcd was given, and its address is not in {job_dir / NOTE} so far",
            )
            told = True
        try:
            if endpoints:
                return connect(endpoints, wait=1.0)
        except EtcdUnreachable as error:
            if is_complete(job_dir):
                raise JobEnded(f"the job in {job_dir} is complete", rule="job-complete") from error
            if time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise GraphftError(
                f"no etcd endpoints: none were given, and {job_dir / NOTE} is not there",
                rule="etcd-endpoints",
                help="give --etcd HOST:PORT[,...] or set GRAPHFT_ETCD",
            )
        time.sleep(0.1)
