"""A trainer's view of its job: what changes in etcd becomes events of the protocol, for its main thread to take in."""

from __future__ import annotations

import threading
import time

from graphft.ops.context import ViewPort
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.events import Rollback, ShardDown, ShardUp, SlotGained, SlotLost, TrainerControl
from graphft.runtime.roles.trainer.quarantine import Quarantine
from graphft.runtime.roles.trainer.state import TrainerState


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
            addresses = {record.id: record.address for record in view.pservers.values()}
            self.state.addresses = addresses | self.state.addresses
            self.state.control.extend(self.changes(before, view))
        self.member.wake()
        return True

    def begun(self, view: JobView) -> bool:
        """True when the job has begun, so that its events mean something."""
        return True

    def changes(self, before: JobView, after: JobView) -> list[TrainerControl]:
        """Returns the protocol's events that lead from one view to the next."""
        events: list[TrainerControl] = []
        for shard in sorted(before.pservers.keys() | after.pservers.keys()):
            was, now = before.pservers.get(shard), after.pservers.get(shard)
            if was is not None and (now is None or now.id != was.id):
                events.append(ShardDown(shard))
            if now is not None and (was is None or now.id != was.id):
                events.append(ShardUp(shard, now.id))
        return events


class SyncTrainerView(TrainerView):
    """The ViewPort of a sync trainer: generations and its slots become events, too.

    `claims`: its program claims slots; otherwise it works on that of its index for good.
    """

    def __init__(self, member: Member, state: TrainerState, quarantine: Quarantine, claims: bool) -> None:
        super().__init__(member, state, quarantine)
        self._claims = claims

    def begun(self, view: JobView) -> bool:
        return view.generation is not None  # the first pserver makes it; nothing can be done before

    def changes(self, before: JobView, after: JobView) -> list[TrainerControl]:
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
