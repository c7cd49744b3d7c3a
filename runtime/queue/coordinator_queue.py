"""The chunk queue of a coordinator, which trainers ask for tasks (chunks).

A claim's `revision` is the number of its attempt. An async trainer holds tasks ahead, worth about `AHEAD_SECONDS`, and
gets more, and finishes others, on another thread. So a step waits for no answer, and goes on while another coordinator
takes over.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future

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
    """Common base of the queues of sync and async trainers, and of TaskLoop."""

    pace: Pace

    def __init__(self, member: Member, client: TaskClient) -> None:
        self.member, self.client, self.plan = member, client, member.config.plan
        self.held: dict[ChunkKey, int] = {}
        """Attempts of all that is held. The next renewal frees what is not among them, ..."""
        self._known = 0
        """... of what this call or one before has given."""
        self._renewed = time.monotonic()

    def given(self, pass_index: int, found: Tasks) -> list[Claim]:
        """Returns the claims that a call was answered with."""
        discarded = {chunk: ChunkDiscards(self.plan, chunk, what) for chunk, what in found.discarded}
        claims = [
            Claim((pass_index, c), int(self.plan.batches[c]), attempt, attempt=1, discards=discarded.get(c))
            for c, attempt in found.tasks
        ]
        self.held |= {claim.key: claim.revision for claim in claims}
        self._known = found.call
        return claims

    def complete(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        self.finish(claims, [])
        return claims

    def finish(self, claims: Sequence[Claim], fences: list[int]) -> set[ChunkKey]:
        """Returns those that were others' by then."""
        lost = set[ChunkKey]()
        for index, some in by_pass(claims):
            tasks = [(claim.key[1], claim.revision) for claim in some]
            lost |= {(index, chunk) for chunk in self._tell(FinishTasks(0, self.member.id, index, tasks, fences), some)}
        if lost:
            log.info("(pass, chunk) %s are not ours to complete any more", sorted(lost))
        return lost

    def release(self, claims: Sequence[Claim]) -> None:
        for index, some in by_pass(claims):
            tasks = [(claim.key[1], claim.revision, claim.progress) for claim in some]
            self._tell(ReleaseTasks(0, self.member.id, index, tasks), some)

    def _tell(self, message: FinishTasks | ReleaseTasks, claims: Sequence[Claim]) -> list[int]:
        """Returns the chunks that are others' by now. The claims are held no more."""
        try:
            answer = self.client.call(message, TasksSettled)
        finally:
            self.forget(claims)
        return answer.refused if answer is not None else []

    def fail(self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False) -> bool:
        change = fail_task(self.client, *claim.key, claim.revision, batch, reason, records, certain)
        self.forget([claim])
        if change is not None:
            tell_discarded(self.member.events, *claim.key, change)
        elif self.member.view.over or self.member.leaving():
            raise WorkChanged
        return change is not None

    def forget(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if self.held.get(claim.key) == claim.revision:
                del self.held[claim.key]

    def renew(self, claims: Sequence[Claim], timeout: float) -> None:
        late = time.monotonic() - self._renewed > timeout / 4 and self.pace.alive_since(self._renewed)
        if late or any(claim.renewed == float("-inf") for claim in claims):
            self.renew_now(claims)

    def renew_now(self, claims: Sequence[Claim] = ()) -> None:
        """Renews all that is held; `claims`: those whose progress is known."""
        known, held = self._known, list(self.held.items())  # in this order: what a call gave is held before
        progress = {claim.key: claim.progress for claim in claims}
        tasks = [(*key, attempt, progress.get(key, 0)) for key, attempt in held]
        if known:  # also if it holds nothing: what a lost answer gave is not to wait for its time-out
            self.client.cast(RenewTasks(known, self.member.id, tasks))
        self._renewed = time.monotonic()
        for claim in claims:
            claim.renewed = self._renewed


class CoordinatorSlotQueue(CoordinatorQueue, SlotQueue):
    """The queue of a sync trainer, which claims the plan's chunks under the slot's key."""

    def __init__(self, member: Member, client: TaskClient, shards: Shards, pace: Pace) -> None:
        super().__init__(member, client)
        self.pace, self.shards = pace, shards

    def claim(self, slot: int, group: Sequence[Located], terms: ClaimTerms) -> list[Claim]:
        chunks, holds = [located.chunk for located in group], self.shards.claim_of(slot)
        at = {"generation": self.shards.generation, "lowest": self.shards.lowest()}
        call = GetTasks(0, self.member.id, group[0].pass_index, slot=slot, holds=holds, chunks=chunks, **at)
        try:
            found = self.client.call(call, Tasks)
        except CallRefused as error:
            if error.code != "fenced":
                raise
            raise WorkChanged from None
        if found is None or len(found.tasks) < len(group):  # the job's last step is applied
            raise WorkChanged
        claims = self.given(group[0].pass_index, found)
        first_steps = {one.chunk: one.chunk_start_step for one in group}
        for claim in claims:
            claim.slot, claim.first_step = slot, first_steps[claim.key[1]]
        return claims


class CoordinatorOpenQueue(CoordinatorQueue, OpenQueue):
    """The queue of an async trainer. `generations`: of each shard, that of its acknowledgements."""

    def __init__(self, member: Member, client: TaskClient, pace: Pace, generations: Callable[[], list[int]]) -> None:
        super().__init__(member, client)
        self.pace, self.generations = pace, generations
        self._mean = max(1.0, float(self.plan.batches.mean()))
        """Batches of a task."""
        self._ahead: deque[Claim] = deque()
        """Claims that were given, and not taken so far."""
        self._getting: Future[None] | None = None
        self._told_pass = -1
        """The pass that is worked on, as the coordinator says."""
        self._finished: deque[tuple[list[Claim], list[int]]] = deque()
        """Claims to finish, with the fences of the time."""
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
        found = self.client.call(GetTasks(0, self.member.id, pass_index, want), Tasks)
        if found is None:
            raise WorkChanged
        claims, self._told_pass = self.given(pass_index, found), found.pass_index
        self._ahead.extend(claims)

    def _forget_others(self) -> None:
        """Releases tasks of another pass than the trainer's: a shard has gone back meanwhile."""
        strange = [claim for claim in self._ahead if claim.key[0] != self.pace.pass_index]
        super().release(strange)
        for claim in strange:
            self._ahead.remove(claim)

    # -- what becomes of them -----------------------------------------------------------------------------------

    def complete(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Finishes them later. If a shard has gone back by then, the coordinator gives the tasks out again."""
        found = shard_generations(self.member, self.generations())
        if found is None:  # a shard went back, and has not said yet what it lacks
            self._background.run(functools.partial(super().release, claims))
        else:
            self._finished.append((list(claims), [kv.mod_revision for kv in found]))
            self._background.run(self._finish_gathered)
        return claims

    def _finish_gathered(self) -> None:
        """Finishes in one call what has gathered while another one was under way."""
        while self._finished:
            claims, fences = self._finished.popleft()
            while self._finished and self._finished[0][1] == fences:
                claims = claims + self._finished.popleft()[0]
            self.finish(claims, fences)

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
