"""What a trainer died of: the launcher looks at what it noted last, and counts a failure of a batch that kills."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from graphft.errors import ordinal
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import read_secret
from graphft.runtime.etcd import EtcdError, Store
from graphft.runtime.process.identity import Identity
from graphft.runtime.process.role_process import EXIT_LEASE_LOST, describe_exit, manner, oom_kills
from graphft.runtime.process.work_record import Note, Phase, read_note, record_path
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.failure_detection import Deaths, Died, Verdict
from graphft.runtime.queue.transactions import fail_batch, tell_discarded
from graphft.runtime.transport.wire import Login

log = logging.getLogger("graphft")

_AT_NOTHING = (Phase.IDLE, Phase.REPORTED)
"""Phases in which the main thread runs none of the user's code; another one may read ahead."""
REPORT_SECONDS = 2.0
"""For how long a coordinator is waited for: the launcher has other processes to look after, and coordinators to start
again."""


class Finding(NamedTuple):
    """`where`: what it was at, in words. `blamed`: what was recorded of the batch, if that was to blame. `counts`:
    whether it is a failure of the process; None: as the status tells."""

    where: str
    blamed: Change | None = None
    counts: bool | None = None


class _Proof(msgspec.Struct):
    """As much as is needed of `graphft.runtime.roles.start_check.Proof`: this process need not have torch."""

    run: str


class DeathAnalysis:
    """Of a launcher's processes, in the order of their deaths. To be asked before a dead one's lease is revoked."""

    def __init__(self, job_dir: Path, keys: Keys, etcd: Store, events: Events) -> None:
        self.job_dir, self.keys, self.etcd, self.events = job_dir, keys, etcd, events
        self._deaths = Deaths()
        self._oom_kills = oom_kills()

    def left(self, index: int, process: Identity) -> bool:
        """Whether this trainer ended because it was asked to, and gave back what it held."""
        note = read_note(record_path(self.job_dir, index), process)
        return note is not None and note.phase == Phase.LEFT

    def reported(self, index: int, process: Identity) -> bool:
        """Whether this trainer ended with the error of a batch, whose failures the queue counts."""
        note = read_note(record_path(self.job_dir, index), process)
        return note is not None and note.phase == Phase.REPORTED

    def died(self, name: str, index: int | None, process: Identity, status: int, peak: int) -> Finding:
        """`index`: a trainer's; None for another role. `peak`: the most memory that it was seen to use, in bytes."""
        note = read_note(record_path(self.job_dir, index), process) if index is not None else None
        at_work = note is not None and note.phase in (Phase.READING, Phase.COMPUTING)
        # Who has lost its lease says so in its note; user code may end with that status, too.
        how = "crashed" if status == EXIT_LEASE_LOST and at_work else manner(status)
        verdict = self._deaths.step(Died(how, note.places if note is not None else frozenset()))
        if note is None or not note.places:
            return Finding(" while it loaded its data" if note is not None and note.phase == Phase.LOADING else "")
        where = self._where(note, verdict, peak)
        if note.phase == Phase.PROVING:
            return Finding(where, counts=(verdict.fatal or None) if self._is_proven() else False)
        if not verdict.fatal or not note.claim or note.phase in _AT_NOTHING:
            return Finding(where)
        return Finding(where, self._charge(f"{name} died ({describe_exit(status)}){where}", note, status, peak))

    def _count(self, note: Note, what: str) -> Change | None:
        """Where the batch's failures are counted; None: it was not, for the claim is somebody else's by now, say."""
        from graphft.transpiler import read_record

        record = read_record(self.job_dir)
        if record.config.dispatch != "coordinator":
            return fail_batch(self.etcd, self.keys, record.config.plan, *note.place, claim=note.claim, reason=what)
        from graphft.runtime.queue.task_client import report_failed

        login = Login(record.run_id, read_secret(self.etcd, self.keys))
        change = report_failed(
            self.etcd, self.keys, login, note.place, claim=note.claim, reason=what, deadline=REPORT_SECONDS
        )
        if change is None:
            log.warning("no coordinator has counted that %s", what)
        return change

    def _is_proven(self) -> bool:
        """Whether a trainer has computed the batch that all prove themselves with. Until then they give it up by
        themselves if it ends one after the other; after that, who ends in it has only itself to blame."""
        try:
            run, proof = self.etcd.get(self.keys.run), self.etcd.get(self.keys.proof("trainer"))
            if run is None or proof is None:
                return False
            return msgspec.json.decode(proof.value, type=_Proof).run == run.value.decode()
        except (EtcdError, msgspec.DecodeError, UnicodeDecodeError):
            return False

    def _where(self, note: Note, verdict: Verdict, peak: int) -> str:
        verb = {Phase.READING: "reading", Phase.COMPUTING: "computing", Phase.PROVING: "checking its start with"}.get(
            note.phase, "reading ahead"
        )
        place = note.place if note.phase not in _AT_NOTHING or note.ahead is None else note.ahead
        parts = [f" while {verb} batch {place.batch} of chunk {place.chunk} in pass {place.pass_index}"]
        if note.phase not in _AT_NOTHING and note.ahead is not None:
            later = note.ahead
            parts.append(f"and reading batch {later.batch} of chunk {later.chunk} in pass {later.pass_index} ahead")
        if verdict.in_a_row > 1:
            parts.append(f"the {ordinal(verdict.in_a_row)} time in a row")
        if peak:
            parts.append(f"with {peak / 1e6:,.0f} MB of memory seen")
        before, self._oom_kills = self._oom_kills, oom_kills()
        if before is not None and self._oom_kills is not None and self._oom_kills > before:
            parts.append("the kernel killed a process for lack of memory")
        return ", ".join(parts)

    def _charge(self, what: str, note: Note, status: int, peak: int) -> Change | None:
        place = note.place
        try:
            change = self._count(note, what)
        except EtcdError as error:
            log.warning("cannot record that %s: %s", what, error.message)
            return None
        if change is None:
            return None
        self.events.emit(
            "step-failed",
            what,
            chunk=place.chunk,
            pass_index=place.pass_index,
            batch=place.batch,
            status=status,
            peak_bytes=peak,
            oom_kills=self._oom_kills,
        )
        tell_discarded(self.events, place.pass_index, place.chunk, change)
        return change
