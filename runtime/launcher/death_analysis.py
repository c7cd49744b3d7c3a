"""Finds what a trainer died of, by what it noted last, and counts a failure of a batch that kills."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import guest_login
from graphft.runtime.etcd import EtcdError, Store
from graphft.runtime.process.identity import Identity
from graphft.runtime.process.role_process import EXIT_LEASE_LOST, describe_exit, manner, oom_kills
from graphft.runtime.process.work_record import Note, Phase, read_note, record_path
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.failure_detection import Deaths
from graphft.runtime.queue.task_client import report_failed
from graphft.runtime.queue.transactions import fail_batch, tell_discarded
from graphft.transpiler.record import read_record

log = logging.getLogger("graphft")

_AT_NOTHING = (Phase.IDLE, Phase.REPORTED)
"""Phases in which the main thread runs none of the user's code; another one may read ahead."""
REPORT_SECONDS = 2.0
"""For how long a coordinator is waited for: the launcher has other processes to look after, and coordinators to start
again."""


class Finding(NamedTuple):
    """`where`: what it was at, in words. `blamed`: what was recorded of the batch, if that was to blame. `counts`: as a
    failure of the process; None: as the status tells."""

    where: str
    blamed: Change | None = None
    counts: bool | None = None


class DeathAnalysis:
    """Analyses deaths in their order, before the dead one's lease is revoked."""

    def __init__(self, job_dir: Path, keys: Keys, etcd: Store, events: Events) -> None:
        self.job_dir, self.keys, self.etcd, self.events = job_dir, keys, etcd, events
        self._deaths = Deaths()
        self._oom_kills = oom_kills()

    def phase(self, index: int, process: Identity) -> Phase | None:
        """Returns the phase in which this trainer ended: LEFT if it was asked to, REPORTED with the error of a batch,
        whose failures the queue counts."""
        note = read_note(record_path(self.job_dir, index), process)
        return note.phase if note is not None else None

    def died(self, name: str, index: int | None, process: Identity, status: int) -> Finding:
        """Returns what is found of a process that ended with this status; `index`: a trainer's."""
        note = read_note(record_path(self.job_dir, index), process) if index is not None else None
        at_work = note is not None and note.phase in (Phase.READING, Phase.COMPUTING)
        # Who has lost its lease says so in its note; user code may end with that status, too.
        how = "crashed" if status == EXIT_LEASE_LOST and at_work else manner(status)
        blamed = self._deaths.blames(how, note.places if note is not None else frozenset())
        if note is None or not note.places:
            return Finding(" while it loaded its data" if note is not None and note.phase == Phase.LOADING else "")
        where = self._where(note)
        if note.phase == Phase.PROVING:
            return Finding(where, counts=(blamed or None) if self._is_proven() else False)
        if not blamed or not note.claim or note.phase in _AT_NOTHING:
            return Finding(where)
        return Finding(where, self._charge(f"{name} died ({describe_exit(status)}){where}", note))

    def _is_proven(self) -> bool:
        """Returns True if a trainer has passed the start check. Until then others give a batch up that ends them."""
        try:
            run, proof = self.etcd.get(self.keys.run), self.etcd.get(self.keys.proof("trainer"))
            if run is None or proof is None:
                return False
            return bool(msgspec.json.decode(proof.value)["run"] == run.value.decode())
        except (EtcdError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
            return False

    def _where(self, note: Note) -> str:
        verb = {Phase.READING: "reading", Phase.COMPUTING: "computing", Phase.PROVING: "checking its start with"}.get(
            note.phase, "reading ahead"
        )
        place = note.place if note.phase not in _AT_NOTHING or note.ahead is None else note.ahead
        where = f" while {verb} batch {place.batch} of chunk {place.chunk} in pass {place.pass_index}"
        before, self._oom_kills = self._oom_kills, oom_kills()
        killed = before is not None and self._oom_kills is not None and self._oom_kills > before
        return where + ", the kernel killed a process for lack of memory" * killed

    def _charge(self, what: str, note: Note) -> Change | None:
        """Counts a failure of the batch. Returns None if the claim is another one's by now."""
        record, place = read_record(self.job_dir), note.place
        try:
            if record.config.dispatch != "coordinator":
                plan = record.config.plan
                change = fail_batch(self.etcd, self.keys, plan, *place, claim=note.claim, reason=what)
            else:
                with guest_login(self.etcd, self.keys) as login:
                    where = self.etcd, self.keys, login, place
                    change = report_failed(*where, claim=note.claim, reason=what, deadline=REPORT_SECONDS)
        except EtcdError as error:
            log.warning("cannot record that %s: %s", what, error.message)
            return None
        if change is None:
            log.warning("nobody has counted that %s", what)
            return None
        at = {"chunk": place.chunk, "pass_index": place.pass_index, "batch": place.batch}
        self.events.emit("step-failed", what, **at)
        tell_discarded(self.events, place.pass_index, place.chunk, change)
        return change
