"""Which slots a sync trainer claims and hands over."""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass

from graphft.ops.context import NotYet, SlotsPort
from graphft.runtime.coordination.job_view import asked_steps, wanted_steps
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import absent, create_is, delete_op, put_op, value_is
from graphft.runtime.protocol.events import SlotLost
from graphft.runtime.protocol.slot_assignment import Assignment, assign
from graphft.runtime.queue.sync_queue import SyncQueue
from graphft.runtime.roles.trainer.bar import Bar
from graphft.runtime.roles.trainer.known_shards import SyncShards
from graphft.runtime.roles.trainer.state import TrainerState
from graphft.runtime.roles.trainer.storage_wait import StorageWait
from graphft.runtime.roles.trainer.sync_comm import SyncComm
from graphft.runtime.roles.trainer.view import SyncTrainerView
from graphft.transpiler.validation import is_validated

log = logging.getLogger("graphft")

LATE_SECONDS = 2.0
"""A view that does not know of a claim by then is of an etcd that was restored from a backup, and lost it."""


@dataclass(eq=False, repr=False)
class SlotClaims(SlotsPort):
    """The SlotsPort of a sync trainer: the daemon thread claims, the main thread hands over."""

    member: Member
    state: TrainerState
    shards: SyncShards
    bar: Bar
    queue: SyncQueue
    comm: SyncComm
    storage: StorageWait
    view: SyncTrainerView

    def __post_init__(self) -> None:
        self._assignment = Assignment()
        self._claimed_at, self._claims_again_at = 0, 0.0

    def await_pass(self) -> None:
        step, config, view = self.queue.ctx.step, self.member.config, self.member.view
        if step >= asked_steps(config, view):
            raise NotYet("the next epoch to be asked for")
        if step >= wanted_steps(config, view):
            open_step = next(iter(view.validating), None)
            of = "a validation" if open_step is None else f"the validation of step {open_step}"
            raise NotYet(of, validation=True)

    def await_validation(self, every: int, passes: bool) -> None:
        step = self.queue.ctx.step
        if is_validated(self.member.config.plan, step, every, passes):
            self.await_pass()

    def claim_slots(self, slots: int, policy: str) -> None:
        member, view = self.member, self.member.view
        if view.over or self.state.leaving or self.shards.finished:
            return  # a trainer that leaves now was through with its slots
        if not self.storage.may_claim():
            return  # it could not compute them
        if member.watcher.revision < self._claimed_at and time.monotonic() < self._claims_again_at:
            return  # the view does not know of the last claim yet, and would have this trainer claim too much
        self._assignment = assign(
            slots=slots,
            live=view.trainers,
            holders=view.slots,
            me=member.id,
            policy=policy,
            barred=self.bar.others(view),
        )
        if not (member.progress.fresh(self.state.lost_at) and self.shards.meets(view.pservers)):
            return  # what this trainer claimed now would wait, and all others with it
        for slot in self._assignment.claim:
            key = member.keys.slot(slot)
            result = member.etcd.txn([absent(key)], [put_op(key, member.id.encode(), member.lease)], token=key)
            if result.ok:
                self._claimed_at, self._claims_again_at = result.revision, time.monotonic() + LATE_SECONDS
                self._tell_claimed(slot)
        if self._assignment.claim:
            self.view.watch()

    def _tell_claimed(self, slot: int) -> None:
        log.info("claimed slot %d (%s)", slot, self._assignment.reason)
        if self.comm.started:
            me = self.member
            me.events.emit("takeover", f"trainer {me.index} took over slot {slot}", slot=slot, trainer=me.id)

    def release_slots(self) -> None:
        assignment, self._assignment = self._assignment, Assignment()
        for slot in assignment.release:
            if slot in self.shards.slots():
                self.hand_over(slot)
                log.info("handed slot %d over (%s)", slot, assignment.reason)

    def hand_over(self, slot: int) -> None:
        """Gives the chunks and the slot back. It is lost here before it is free there: what the watch tells of it later
        may be that it was claimed again."""
        claim = self.shards.claim_of(slot)
        self.queue.release(slot)
        self.comm.control(SlotLost(slot, claim))
        self.member.retry_while_leased(functools.partial(self._free, self.member.keys.slot(slot), claim))

    def _free(self, key: str, claim: int) -> None:
        self.member.etcd.txn([create_is(key, claim), value_is(key, self.member.id.encode())], [delete_op(key)])
