"""Slots of which nothing comes: a shard takes them from their trainers, so that others get them."""

from __future__ import annotations

import logging
import time

import msgspec

from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Barred
from graphft.runtime.etcd import EtcdError, create_is, delete_op, put_op
from graphft.runtime.protocol.failure_detection import IdleSlots
from graphft.runtime.protocol.sync_shard import SyncShard

log = logging.getLogger("graphft")

LOOK_SECONDS = 0.25


class IdleSlotWatch:
    """`timeout`: seconds for which nothing may come of a slot that a round waits for; 0: for ever."""

    def __init__(self, member: Member, timeout: float) -> None:
        self.member, self.timeout = member, timeout
        self._idle, self._look_at = IdleSlots(timeout), 0.0

    def heard(self, slot: int) -> None:
        """Something came of the slot."""
        self._idle.heard(slot)

    def look(self, machine: SyncShard) -> None:
        """While all shards serve, what this one waits for is the trainers'."""
        view, now = self.member.view, time.monotonic()
        if not self.timeout or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        waits = (
            machine.phase == "collecting"
            and not (machine.finished or machine.paused)
            and len(view.trainers) > 1
            and len(view.pservers) == self.member.config.pservers
        )
        holders = {
            slot: (trainer, view.claims[slot]) for slot, trainer in view.slots.items() if trainer in view.trainers
        }
        at, missing = (machine.generation, machine.version), machine.round.missing() if waits else ()
        for slot in self._idle.look(now, at, missing, holders):
            self._take(slot, *holders[slot])

    def _take(self, slot: int, trainer: str, claim: int) -> None:
        """Takes a slot from a trainer, whatever is the matter with it, and bars it, so that another gets the slot."""
        member = self.member
        reason = f"nothing of slot {slot} came to pserver {member.index} for {self.timeout:.0f} s"
        barred = msgspec.json.encode(Barred(reason, member.id))
        bar = put_op(member.keys.barred(trainer), barred, member.view.leases[trainer])
        key = member.keys.slot(slot)
        try:
            taken = member.etcd.txn([create_is(key, claim)], [delete_op(key), bar]).ok
        except EtcdError as error:  # or its lease has ended: then so has its claim
            log.warning("slot %d: %s", slot, error.message)
            return
        if taken:
            member.events.emit(
                "idle-slot",
                f"slot {slot} was taken from trainer {trainer}: nothing came of it for {self.timeout:.0f} s",
                slot=slot,
                trainer=trainer,
            )
