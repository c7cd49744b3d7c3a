"""A trainer's view of its job, whose changes become events of the protocol; and its quarantine, in which it gets no
work.

    /<job>/barred/<trainer> = {reason, by}, on the trainer's lease

A trainer writes it itself while a registered shard does not answer it, and deletes it when all do. A process that takes
a slot or a chunk from a trainer for lack of progress writes it as well; then the trainer deletes it after a while, if
its main thread gets on. The others divide the work among those without a record (`protocol/slot_assignment.py`)."""

from __future__ import annotations

import logging
import threading
import time

import msgspec

from graphft.ops.context import ViewPort
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Barred
from graphft.runtime.etcd import absent, delete_op, mod_is, put_op
from graphft.runtime.protocol.events import Rollback, ShardDown, ShardUp, SlotGained, SlotLost
from graphft.runtime.protocol.machine import Event
from graphft.runtime.protocol.slot_assignment import able
from graphft.runtime.roles.trainer.state import KnownShards, TrainerState

log = logging.getLogger("graphft")

MAX_BACK_OFF = 16
"""Quarantine for lack of progress lasts `chunk_timeout`, the next time twice that, up to so many times that."""


class Quarantine:
    """One trainer's own record. `update` is called by the daemon thread; the questions by any. `claim_timeout`: seconds
    within which a claim must be renewed; infinite if nothing is claimed."""

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


class TrainerView(ViewPort):
    """The ViewPort of a trainer. Shards that come and go become events in `state.control`."""

    def __init__(self, member: Member, state: TrainerState, quarantine: Quarantine) -> None:
        self.member, self.state, self.quarantine = member, state, quarantine
        self._known = JobView()
        self._lock = threading.Lock()

    def watch(self) -> None:
        if self.take_in():
            self.quarantine.update()

    def take_in(self) -> bool:
        """Turns what changed in etcd into events, and wakes the main thread. From any thread. False: the job has not
        begun."""
        with self._lock:  # views must be taken in in order
            view = self.member.view
            if not self.begun(view):
                return False
            before, self._known = self._known, view
            addresses = {record.id: record.keyed_address for record in view.pservers.values()}
            self.state.addresses = addresses | self.state.addresses
            self.state.control.extend(self.changes(before, view))
        self.member.wake()
        return True

    def begun(self, view: JobView) -> bool:
        """True when the job has begun, so that its events mean something."""
        return True

    def changes(self, before: JobView, after: JobView) -> list[Event]:
        """Returns the protocol's events that lead from one view to the next."""
        events: list[Event] = []
        for shard in sorted(before.pservers.keys() | after.pservers.keys()):
            was, now = before.pservers.get(shard), after.pservers.get(shard)
            if was is not None and (now is None or now.id != was.id):
                events.append(ShardDown(shard))
            if now is not None and (was is None or now.id != was.id):
                events.append(ShardUp(shard, now.id))
        return events


class SyncTrainerView(TrainerView):
    """The ViewPort of a sync trainer: generations and its slots become events, too. `claims`: its program claims slots;
    otherwise it works on that of its index for good."""

    def __init__(self, member: Member, state: TrainerState, quarantine: Quarantine, claims: bool) -> None:
        super().__init__(member, state, quarantine)
        self._claims = claims

    def begun(self, view: JobView) -> bool:
        return view.generation is not None  # the first pserver makes it; nothing can be done before

    def changes(self, before: JobView, after: JobView) -> list[Event]:
        old, new = before.generation, after.generation
        rollback = []
        if new is not None and new.number > (old.number if old is not None else -1):
            rollback.append(Rollback(new.number, new.step))
        # By claim, not by holder: a slot that was lost and claimed again between two looks begins anew.
        mine_before, mine = self._mine(before), self._mine(after)
        if not self._claims and before.generation is None:
            mine = {(self.member.index, 0)}  # for good: no process takes it over
        lost = [SlotLost(*slot) for slot in sorted(mine_before - mine)]
        if lost:
            self.state.lost_at = time.monotonic()
        gained = [SlotGained(*slot) for slot in sorted(mine - mine_before)]
        return [*rollback, *super().changes(before, after), *lost, *gained]

    def _mine(self, view: JobView) -> set[tuple[int, int]]:
        """Returns this trainer's slots, each with the revision of its claim."""
        return {(v, view.claims[v]) for v, holder in view.slots.items() if holder == self.member.id}
