"""The way to a job's etcd: endpoints, login and certificates."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from graphft.errors import GraphftError
from graphft.fileio import NotRegular, read_regular, write_atomically
from graphft.runtime.coordination.job_storage import MODEL, is_stored_complete
from graphft.runtime.etcd import Etcd, EtcdUnreachable
from graphft.runtime.etcd.client import open_etcd
from graphft.runtime.transport.address import network_identity
from graphft.sealed_json import parse_json

log = logging.getLogger("graphft")

ANSWER_SECONDS = 5.0
"""For how long etcd may not answer at first, ..."""
WAIT_SECONDS = 60.0
"""... and for how long a launcher may take to leave its endpoints in the job's folder. A role waits as long for
an etcd that does not answer."""
TELL_SECONDS = 2.0
"""A wait for it that is longer than this is told."""
NOTE = "etcd.json"
"""In the job's folder: where its etcd is (`noted_etcd`)."""


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
    """Leaves in the job's folder where its etcd is. `own`: it was started with the job. Raises OSError."""
    where = {"host": socket.gethostname(), "network": network_identity()}
    write_atomically(job_dir / NOTE, json.dumps({"endpoints": endpoints, "own": own, **where}).encode())


def read_endpoints(job_dir: Path) -> str:
    """What was left there; "" if nothing was, or it is damaged: the next launcher writes it anew."""
    path = job_dir / NOTE
    try:
        return str(parse_json(read_regular(path))["endpoints"]) if path.exists() else ""
    except (ValueError, KeyError, TypeError, IsADirectoryError, NotRegular) as error:
        log.warning("%s is damaged: %s", path, error)
        return ""


def has_model(job_dir: Path) -> bool:
    """Whether the job in this folder has come to its end, as far as the folder tells: it leaves its model there."""
    return (job_dir / MODEL).exists()


def is_complete(job_dir: Path) -> bool:
    """Whether the job in this folder has come to its end; its storage is asked, too, if it has one."""
    return has_model(job_dir) or is_stored_complete(job_dir)


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
