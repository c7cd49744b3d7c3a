"""The etcd that a job's folder names (`etcd.json`). A run is at work in one etcd: two that know nothing of each other
would write to, and delete from, one folder of checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.errors import GraphftError, UsageError, describe
from graphft.fileio import read_regular
from graphft.runtime.coordination import connect
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import RunRecord
from graphft.runtime.coordination.run_record import is_copied
from graphft.runtime.coordination.stale_run import DYING_SECONDS, POLL_SECONDS
from graphft.runtime.coordination.status import UNKNOWN_JOB, JobStatus, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.etcd.channel import Endpoint, parse_endpoint
from graphft.runtime.process.folder_lock import holder_of
from graphft.runtime.process.identity import Identity
from graphft.runtime.transport.address import is_loopback, network_identity
from graphft.sealed_json import parse_json

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobRecord

log = logging.getLogger("graphft")


class EtcdNote(msgspec.Struct, frozen=True):
    """`endpoints`: "" if none are known. `own`: the etcd was started with the job, and ends with its launcher. `host`,
    `network`: of the process that wrote the note."""

    endpoints: str = ""
    own: bool = False
    host: str = ""
    network: str = ""

    def addresses(self) -> set[Endpoint]:
        return {parse_endpoint(text) for text in self.endpoints.split(",")}

    @property
    def elsewhere(self) -> bool:
        """Whether the etcd is on the loopback of another network, or of this machine before it was started again."""
        local = bool(self.endpoints) and all(is_loopback(address.host) for address in self.addresses())
        return local and bool(self.network) and self.network != network_identity()

    @property
    def ended(self) -> bool:
        """Whether it is known that nothing of it is left: this machine was started again since."""
        booted, now = (network.partition(" ")[0] for network in (self.network, network_identity()))
        return self.elsewhere and self.host == socket.gethostname() and booted != now


def read_note(job_dir: Path) -> EtcdNote:
    """What was left there, if it can be read. Of a note that does not say so, the etcd is the job's own if its data are
    in the folder."""
    if not connect.read_endpoints(job_dir):  # which tells of a damaged one
        return EtcdNote()
    found = parse_json(read_regular(job_dir / connect.NOTE))
    try:
        note = msgspec.convert({"own": (job_dir / "etcd").is_dir(), **found}, EtcdNote)
        note.addresses()
        return note
    except (msgspec.ValidationError, GraphftError) as error:
        log.warning("%s is damaged: %s", job_dir / connect.NOTE, describe(error))
        return EtcdNote()


def leave_note(job_dir: Path, endpoints: str) -> None:
    """For a process that was given `endpoints`: so that others find the run there. A folder that takes no note stays
    without one."""
    try:
        connect.write_endpoints(job_dir, endpoints)
    except OSError as error:
        log.info("cannot note in %s where its etcd is: %s", job_dir, error)


@contextlib.contextmanager
def noted_etcd(note: EtcdNote, wait: float) -> Iterator[Etcd | None]:
    """A client of it; None if it cannot be asked from here, or does not answer for so many seconds."""
    if not note.endpoints or note.elsewhere:
        yield None
        return
    try:
        client = connect.connect(note.endpoints, wait)
    except GraphftError as error:
        log.debug("%s: %s", note.endpoints, error.message)
        yield None
        return
    with client:
        yield client


def check_no_other_etcd(job_dir: Path, record: Job | JobRecord, etcd: Etcd | None = None) -> bool:
    """Raises UsageError[job-running] if processes of this very run are at work in another etcd than `etcd` (None: one
    that this process will start), which the folder names; UsageError[etcd-endpoints] if that may be, and it cannot be
    asked. Returns whether the folder names `etcd`.

    The etcd that an earlier launcher started is gone with it: who starts the next one holds the folder's lock.
    """
    note, keys = read_note(job_dir), Keys(record.config.name)
    if not note.endpoints or note.ended or (note.own and etcd is None):
        return False
    if etcd is not None and not note.elsewhere and note.addresses() & set(map(parse_endpoint, etcd.endpoints)):
        return True
    with noted_etcd(note, connect.ANSWER_SECONDS) as other:
        if other is None:
            _cannot_be_asked(job_dir, note, etcd)
            return False
        if etcd is not None and _is_same(other, etcd, keys):
            return True
        if alive := _at_work(other, keys, record.run_id, job_dir):
            raise UsageError(
                f"the job in {job_dir} is being run in the etcd {note.endpoints}, by {', '.join(alive[:3])}",
                rule="job-running",
                help=f"join it with --etcd {note.endpoints}, or stop its processes first (those that are known to be "
                f"dead: graphft forget --force {keys.job} --etcd {note.endpoints})",
            )
    return False


def _cannot_be_asked(job_dir: Path, note: EtcdNote, etcd: Etcd | None) -> None:
    if note.own:
        launcher, mine = holder_of(job_dir), f"pid {os.getpid()} "
        if launcher and not launcher.startswith(mine):  # on another machine: here its etcd would answer
            raise UsageError(
                f"the job in {job_dir} is being run by {launcher}, with an etcd that no other machine reaches",
                rule="job-running",
                help="stop it first; or run etcd where all machines reach it, and give --etcd to each",
            )
        return
    if note.elsewhere and etcd is not None:
        log.info("%s names the etcd %s, of another network; here it is %s", job_dir, note.endpoints, etcd.endpoints)
        return
    what = f"{job_dir / connect.NOTE} says that this run is in the etcd {note.endpoints}, which does not answer here"
    if etcd is not None:
        log.warning(
            "%s; it goes on in %s. Processes of it that are left there must end", what, ", ".join(etcd.endpoints)
        )
        return
    raise UsageError(
        f"{what}: whether processes of it are at work is not known",
        rule="etcd-endpoints",
        help=f"give --etcd, of that etcd or of one that takes its place; or, when all processes of the run have ended, "
        f"delete {job_dir / connect.NOTE}: then it goes on from its newest checkpoint in an etcd of its own",
    )


def _is_same(one: Etcd, other: Etcd, keys: Keys) -> bool:
    """One etcd has many names. The run's secret was made in one."""
    secret = one.get(keys.secret)
    found = other.get(keys.secret)
    return secret is not None and found is not None and secret.value == found.value


def _at_work(etcd: Etcd, keys: Keys, run_id: str, job_dir: Path) -> list[str]:
    """Processes of this very run that are not known to be dead, in words. Some may be dying: it looks for a moment."""
    end = time.monotonic() + DYING_SECONDS
    while True:
        try:
            status = read_status(etcd, keys, brief=True)
        except GraphftError as error:
            if error.rule != UNKNOWN_JOB:
                raise
            return []
        spec = msgspec.convert(status.spec, RunRecord)
        if spec.run != run_id or status.state != "running" or is_copied(spec, job_dir):
            return []
        alive = _alive(status)
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(POLL_SECONDS)


def _alive(status: JobStatus) -> list[str]:
    groups = {
        "pserver": status.pservers.values(),
        "trainer": status.trainers.values(),
        "coordinator": status.coordinators.values(),
        "process that loads": status.loading.values(),
    }
    return [
        f"a {role} (pid {member['pid']} on {member['host']})"
        for role, members in groups.items()
        for member in members
        if not msgspec.convert(member.get("process", {}), Identity).dead
    ]
