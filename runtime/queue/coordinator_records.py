"""Where a sync trainer's claims are recorded in a job with a coordinator: there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence

import msgspec

from graphft.ops.context import WorkChanged
from graphft.plan import Located
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.left_out import ChunkOmissions
from graphft.runtime.protocol.messages import FinishTasks, GetTasks, ReleaseTasks, RenewTasks, Tasks, TasksSettled
from graphft.runtime.queue.failed_task import fail_task
from graphft.runtime.queue.pace import Pace
from graphft.runtime.queue.slot_records import Claim, Granted, Shards, SlotRecords
from graphft.runtime.queue.task_client import CallRefused, TaskClient, by_pass


class CoordinatorRecords(SlotRecords):
    """Claims are made for the plan's chunks, under the slot's key; a claim's `revision` is the attempt's number."""

    def __init__(self, member: Member, client: TaskClient, shards: Shards, pace: Pace) -> None:
        self.member, self.client, self.shards, self.pace = member, client, shards, pace
        self.plan = member.config.plan
        self._held: dict[tuple[int, int], int] = {}
        """By pass and chunk, the attempt. What is not among them is free again after the next renewal, ..."""
        self._known = 0
        """... if this call or one before has given it."""

    def claim(self, slot: int, group: Sequence[Located]) -> Granted:
        def call(number: int) -> GetTasks:
            return GetTasks(
                number,
                self.member.id,
                group[0].pass_index,
                slot=slot,
                holds=self.shards.claim_of(slot),
                chunks=[located.chunk for located in group],
                generation=self.shards.generation,
                lowest=self.shards.lowest(),
            )

        try:
            found = self.client.call(call, Tasks)
        except CallRefused as error:
            if error.code != "fenced":
                raise
            raise WorkChanged from None
        if len(found.tasks) < len(group):  # the job's last step is applied
            raise WorkChanged
        revisions = {(group[0].pass_index, chunk): attempt for chunk, attempt in found.tasks}
        self._held |= revisions
        self._known = found.call
        return Granted(revisions, {chunk: ChunkOmissions(self.plan, chunk, what) for chunk, what in found.left_out})

    def complete(self, claims: Sequence[Claim]) -> None:
        for pass_index, some in by_pass((claim.pass_index, claim) for claim in claims):
            tasks = [(claim.chunk, claim.revision) for claim in some]
            self._tell(FinishTasks(0, self.member.id, pass_index, tasks))
        self.forget(claims)

    def release(self, claims: Sequence[Claim]) -> None:
        for pass_index, some in by_pass((claim.pass_index, claim) for claim in claims):
            tasks = [(claim.chunk, claim.revision, self._progress(claim)) for claim in some]
            self._tell(ReleaseTasks(0, self.member.id, pass_index, tasks))
        self.forget(claims)

    def _tell(self, message: FinishTasks | ReleaseTasks) -> None:
        with contextlib.suppress(WorkChanged):  # the job is over: nothing is to be told of it
            self.client.call(lambda number: msgspec.structs.replace(message, call=number), TasksSettled)

    def forget(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if self._held.get(key := (claim.pass_index, claim.chunk)) == claim.revision:
                del self._held[key]

    def fail(
        self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> Change | None:
        where = claim.pass_index, claim.chunk, claim.revision, batch
        return fail_task(self.client, *where, reason, records, certain)

    def tend(self, claims: Sequence[Claim], timeout: float) -> None:
        now = time.monotonic()
        if not any(now - c.touched > timeout / 4 and self.pace.alive_since(c.touched) for c in claims):
            return
        known, held = self._known, list(self._held.items())  # in this order: what a call gave is held before
        progress = {(c.pass_index, c.chunk): self._progress(c) for c in claims}
        tasks = [(*key, attempt, progress.get(key, 0)) for key, attempt in held]
        self.client.cast(lambda _: RenewTasks(known, self.member.id, tasks))
        for claim in claims:
            claim.touched = now

    def _progress(self, claim: Claim) -> int:
        return min(max(0, self.shards.lowest() - claim.first_step), int(self.plan.batches[claim.chunk]))
