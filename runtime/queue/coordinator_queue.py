"""A coordinator has the queue: trainers ask it for tasks (chunks), and tell it what became of them.

A claim's `revision` is the number of its attempt. An async trainer holds tasks ahead, worth about `AHEAD_SECONDS`, and
gets more while it works on them; what is finished is told by the same thread. So a step waits for no answer, and a
coordinator's death is not felt while its successor takes over.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

import msgspec

from graphft.ops.context import ClaimTerms, EndOfPass, NoData, WorkChanged
from graphft.plan import Located
from graphft.runtime.coordination.member import Member
from graphft.runtime.protocol.chunk_queue import ChunkDiscards
from graphft.runtime.protocol.events import ChunkKey
from graphft.runtime.protocol.messages import FinishTasks, GetTasks, ReleaseTasks, RenewTasks, Tasks, TasksSettled
from graphft.runtime.queue.chunk_queue import (
    CLAIM_BATCHES,
    BackgroundTasks,
    ChunkQueue,
    Claim,
    OpenQueue,
    Pace,
    SlotQueue,
    by_pass,
    shard_generations,
)
from graphft.runtime.queue.sync_queue import Shards
from graphft.runtime.queue.task_client import CallRefused, TaskClient, fail_task
from graphft.runtime.queue.transactions import tell_discarded

log = logging.getLogger("graphft")

AHEAD_SECONDS = 2.0
"""Tasks worth so much time are held ahead, ..."""
MAX_AHEAD = 256
"""... but no more of them."""


class CoordinatorQueue(ChunkQueue):
    """The base of the queues of sync and async trainers."""

    def __init__(self, member: Member, client: TaskClient, pace: Pace) -> None:
        self.member, self.client, self.pace, self.plan = member, client, pace, member.config.plan
        self._held: dict[ChunkKey, int] = {}
        """Attempts of all that is held. What is not among it is free again after the next renewal, ..."""
        self._known = 0
        """... if this call or one before has given it."""
        self._renewed = time.monotonic()

    def _given(self, pass_index: int, found: Tasks) -> list[Claim]:
        """Returns the claims that a call was answered with."""
        discarded = {chunk: ChunkDiscards(self.plan, chunk, what) for chunk, what in found.discarded}
        claims = [
            Claim((pass_index, c), int(self.plan.batches[c]), attempt, attempt=1, discards=discarded.get(c))
            for c, attempt in found.tasks
        ]
        self._held |= {claim.key: claim.revision for claim in claims}
        self._known = found.call
        return claims

    def complete(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        self._finish(claims, [])
        return claims

    def _finish(self, claims: Sequence[Claim], fences: list[int]) -> None:
        for index, some in by_pass(claims):
            tasks = [(claim.key[1], claim.revision) for claim in some]
            for chunk in self._tell(FinishTasks(0, self.member.id, index, tasks, fences), some):
                log.info("chunk %d of pass %d is not ours to complete any more", chunk, index)

    def release(self, claims: Sequence[Claim]) -> None:
        for index, some in by_pass(claims):
            tasks = [(claim.key[1], claim.revision, claim.progress) for claim in some]
            self._tell(ReleaseTasks(0, self.member.id, index, tasks), some)

    def _tell(self, message: FinishTasks | ReleaseTasks, claims: Sequence[Claim]) -> list[int]:
        """Returns the chunks that are others' by now. These claims are held no more."""
        try:
            answer = self.client.call(lambda number: msgspec.structs.replace(message, call=number), TasksSettled)
        except WorkChanged:
            return []  # the job is over: nothing is to be told of it
        finally:
            self.forget(claims)
        return answer.refused

    def fail(self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False) -> bool:
        change = fail_task(self.client, *claim.key, claim.revision, batch, reason, records, certain)
        self.forget([claim])
        if change is not None:
            tell_discarded(self.member.events, *claim.key, change)
        return change is not None

    def forget(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if self._held.get(claim.key) == claim.revision:
                del self._held[claim.key]

    def renew(self, claims: Sequence[Claim], timeout: float) -> None:
        now = time.monotonic()
        urgent = any(claim.renewed == float("-inf") for claim in claims)
        if not (urgent or (now - self._renewed > timeout / 4 and self.pace.alive_since(self._renewed))):
            return
        known, held = self._known, list(self._held.items())  # in this order: what a call gave is held before
        progress = {claim.key: claim.progress for claim in claims}
        tasks = [(*key, attempt, progress.get(key, 0)) for key, attempt in held]
        if known:  # also if it holds nothing: what a lost answer gave is not to wait for its time-out
            self.client.cast(lambda _: RenewTasks(known, self.member.id, tasks))
        self._renewed = now
        for claim in claims:
            claim.renewed = now


class CoordinatorSlotQueue(CoordinatorQueue, SlotQueue):
    """The queue of a sync trainer: claims are made for the plan's chunks, under the slot's key."""

    def __init__(self, member: Member, client: TaskClient, shards: Shards, pace: Pace) -> None:
        super().__init__(member, client, pace)
        self.shards = shards

    def claim(self, slot: int, group: Sequence[Located], terms: ClaimTerms) -> list[Claim]:
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
        claims, first_steps = (
            self._given(group[0].pass_index, found),
            {one.chunk: one.chunk_start_step for one in group},
        )
        for claim in claims:
            claim.slot, claim.first_step = slot, first_steps[claim.key[1]]
        return claims


class CoordinatorOpenQueue(CoordinatorQueue, OpenQueue):
    """The queue of an async trainer. `generations`: each shard's, in which its acknowledgements were given."""

    def __init__(self, member: Member, client: TaskClient, pace: Pace, generations: Callable[[], list[int]]) -> None:
        super().__init__(member, client, pace)
        self.generations = generations
        self._mean = max(1.0, float(self.plan.batches.mean()))
        """Batches of a task."""
        self._ahead: deque[Claim] = deque()
        """Got, and not taken so far."""
        self._getting: Future[None] | None = None
        self._told_pass = -1
        """The pass that is worked on, as the coordinator says."""
        self._finished: deque[tuple[list[Claim], list[int]]] = deque()
        """Applied wholly, and not told so far; with the fences of the time."""
        self._background = BackgroundTasks("tasks")

    # -- taking -------------------------------------------------------------------------------------------------

    def take(self, terms: ClaimTerms) -> list[Claim]:
        self._background.check()
        self._forget_others()
        if not self._ahead:
            self._get_more()
            self._await()
            self._forget_others()
        if not self._ahead:
            if self._told_pass != self.pace.pass_index:
                raise EndOfPass
            raise NoData  # others hold what is left
        taken, batches = [], 0
        while self._ahead and batches < CLAIM_BATCHES:
            taken.append(self._ahead.popleft())
            batches += taken[-1].batches
        if len(self._ahead) < self._wanted() // 2:
            self._get_more()
        return taken

    def next_pass(self) -> int:
        return self._told_pass

    def _wanted(self) -> int:
        """Returns the number of tasks to hold ahead."""
        batches = max(float(CLAIM_BATCHES), AHEAD_SECONDS * self.pace.pace)
        return max(1, min(MAX_AHEAD, round(batches / self._mean)))

    def _get_more(self) -> None:
        if self._getting is None:
            want, pass_index = max(1, self._wanted() - len(self._ahead)), self.pace.pass_index
            self._getting = self._background.submit(functools.partial(self._get, want, pass_index))
        elif self._getting.done():
            self._await()
            self._get_more()

    def _await(self) -> None:
        getting, self._getting = self._getting, None
        if getting is not None:
            getting.result()

    def _get(self, want: int, pass_index: int) -> None:
        found = self.client.call(lambda n: GetTasks(n, self.member.id, pass_index, want), Tasks)
        claims, self._told_pass = self._given(pass_index, found), found.pass_index
        self._ahead.extend(claims)

    def _forget_others(self) -> None:
        """Tasks ahead that are of another pass than the trainer's: a shard has gone back meanwhile."""
        strange = [claim for claim in self._ahead if claim.key[0] != self.pace.pass_index]
        super().release(strange)
        for claim in strange:
            self._ahead.remove(claim)

    # -- what becomes of them -----------------------------------------------------------------------------------

    def complete(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Told later. If a shard has gone back by then, the coordinator gives the tasks out again."""
        found = shard_generations(self.member, self.generations())
        if found is None:  # a shard is back, which has not said yet what it lacks
            self._background.run(functools.partial(super().release, claims))
        else:
            self._finished.append((list(claims), [kv.mod_revision for kv in found]))
            self._background.run(self._finish_gathered)
        return claims

    def _finish_gathered(self) -> None:
        """In one call, what has gathered while another one was under way."""
        while self._finished:
            claims, fences = self._finished.popleft()
            while self._finished and self._finished[0][1] == fences:
                claims = claims + self._finished.popleft()[0]
            self._finish(claims, fences)

    def release(self, claims: Sequence[Claim]) -> None:
        try:
            self._await()
            self._background.wait()
        except WorkChanged:
            return  # the job is over
        super().release([*claims, *self._ahead])
        self._ahead.clear()

    def close(self) -> None:
        self._background.close()
