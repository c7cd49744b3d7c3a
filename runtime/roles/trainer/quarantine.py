"""A trainer's quarantine: a record in etcd because of which it gets no work for a while.

    /<job>/barred/<trainer> = {reason, by}, on the trainer's lease

A trainer writes it itself while a shard that is registered does not answer it, and deletes it when all do. A process
that takes a slot or a chunk from a trainer for lack of progress writes it as well, in the same transaction; then the
trainer deletes it after a while, if its main thread gets on. The others divide the work among those without a record
(`protocol/slot_assignment.py`); a trainer whose peers are all in quarantine goes on as if none were.
"""

from __future__ import annotations

import logging
import time

import msgspec

from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Barred
from graphft.runtime.etcd import absent, delete_op, mod_is, put_op
from graphft.runtime.protocol.slot_assignment import able
from graphft.runtime.roles.trainer.state import KnownShards

log = logging.getLogger("graphft")

MAX_BACK_OFF = 16
"""Quarantine for lack of progress lasts `chunk_timeout`, the next time twice that, up to so many times that."""


class Quarantine:
    """One trainer's own record. `update` is called by the daemon thread; the questions by any.

    `claim_timeout`: seconds within which a claim must be renewed; infinite if nothing is claimed.
    """

    def __init__(self, member: Member, shards: KnownShards, claim_timeout: float) -> None:
        self.member, self.shards, self.key = member, shards, member.keys.barred(member.id)
        self._told: Barred | None = None
        self._claim_timeout = claim_timeout
        self._since, self._back_off = 0.0, claim_timeout / 2
        self.silent: tuple[str, ...] = ()
        """Shards that do not answer, with their addresses; for people."""

    def applies(self, view: JobView) -> bool:
        """True if this trainer is in quarantine. Its own record is void as soon as all shards answer."""
        record = view.barred.get(self.member.id)
        return record is not None and (record.by != self.member.id or bool(self.shards.silent()))

    def others(self, view: JobView) -> set[str]:
        """Returns the ids of all trainers in quarantine."""
        return set(view.barred) - (set() if self.applies(view) else {self.member.id})

    def sidelined(self) -> bool:
        """True if this trainer is to hold nothing, as others can have it."""
        view = self.member.view
        return bool(view.barred) and self.member.id not in able(view.trainers, self.others(view))

    def update(self) -> None:
        """Writes or deletes the record."""
        member, view = self.member, self.member.view
        silent, record = self.shards.silent(), view.barred.get(member.id)
        self.silent = tuple(f"shard {s} at {view.pservers[s].address}" for s in silent if s in view.pservers)
        if not member.lease or member.id not in view.trainers:
            return
        if record is not None and record.by != member.id:
            self._serve(record, bool(silent))
        elif record is None and self.silent:
            self._write(f"it cannot reach {', '.join(self.silent)}")
        elif record is not None and not silent and self._delete():
            log.info("all shards answer again")
        self._told = record

    def _serve(self, record: Barred, silent: bool) -> None:
        """Sits another process's record out: for a while, and until the main thread gets on."""
        now = time.monotonic()
        if self._told is None:
            self._since, self._back_off = now, min(2 * self._back_off, MAX_BACK_OFF * self._claim_timeout)
            log.warning("no work for this trainer for %.0f s: %s", self._back_off, record.reason)
        over = now - self._since > self._back_off and self.member.progress.fresh(self._since)
        if over and not silent:
            self._delete()

    def _write(self, reason: str) -> None:
        member, value = self.member, msgspec.json.encode(Barred(reason, self.member.id))
        if member.etcd.txn([absent(self.key)], [put_op(self.key, value, member.lease)], token=self.key).ok:
            member.events.emit("barred", f"trainer {member.index} gets no work: {reason}", trainer=member.id)

    def _delete(self) -> bool:
        """Returns True if it was there as seen."""
        kv = self.member.watcher.snapshot().get(self.key)
        return kv is not None and self.member.etcd.txn([mod_is(kv.key, kv.mod_revision)], [delete_op(kv.key)]).ok
