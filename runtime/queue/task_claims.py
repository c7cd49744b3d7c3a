"""Chunks that an async trainer gets from the coordinator as tasks, and what becomes of them there.

A trainer holds tasks ahead, worth about `AHEAD_SECONDS`, and gets more while it works on them; what is finished is told
by the same thread. So a step waits for no answer, and a coordinator's death is not felt while its successor takes over.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future

import msgspec

from graphft.ops.context import EndOfPass, NoData, WorkChanged
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import decode_generation
from graphft.runtime.protocol.async_events import ChunkKey
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.left_out import ChunkOmissions
from graphft.runtime.protocol.messages import FinishTasks, GetTasks, ReleaseTasks, RenewTasks, Tasks, TasksSettled
from graphft.runtime.queue.async_queue import Source
from graphft.runtime.queue.background_tasks import BackgroundTasks
from graphft.runtime.queue.chunk_claims import CLAIM_BATCHES, Claim
from graphft.runtime.queue.failed_task import fail_task
from graphft.runtime.queue.pace import Pace
from graphft.runtime.queue.task_client import TaskClient, by_pass
from graphft.runtime.queue.transactions import tell_left_out

log = logging.getLogger("graphft")

AHEAD_SECONDS = 2.0
"""Tasks worth so much time are held ahead, ..."""
MAX_AHEAD = 256
"""... but no more of them."""


class TaskClaims(Source):
    """`generations`: each shard's, in which its acknowledgements were given."""

    def __init__(self, member: Member, client: TaskClient, pace: Pace, generations: Callable[[], list[int]]) -> None:
        self.member, self.client, self.pace, self.generations = member, client, pace, generations
        self.plan = member.config.plan
        self._mean = max(1.0, float(self.plan.batches.mean()))
        """Batches of a task."""
        self._ahead: deque[Claim] = deque()
        """Got, and not taken so far."""
        self._getting: Future[None] | None = None
        self._told_pass = -1
        """The pass that is worked on, as the coordinator says."""
        self._held: dict[ChunkKey, int] = {}
        """Attempts of all that is held. What is not among it is free again after the next renewal, ..."""
        self._finished: deque[tuple[list[Claim], list[int]]] = deque()
        """Applied wholly, and not told so far; with the fences of the time."""
        self._known = 0
        """... if this call or one before has given it."""
        self._renewed = time.monotonic()
        self._background = BackgroundTasks("tasks")

    # -- taking -------------------------------------------------------------------------------------------------

    def take(self) -> list[Claim]:
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
        """How many tasks to hold ahead."""
        batches = max(float(CLAIM_BATCHES), AHEAD_SECONDS * self.pace.pace)
        return max(1, min(MAX_AHEAD, round(batches / self._mean)))

    def _get_more(self) -> None:
        if self._getting is None:
            want, pass_index = max(1, self._wanted() - len(self._ahead)), self.pace.pass_index
            self._getting = self._background.submit(lambda: self._get(want, pass_index))
        elif self._getting.done():
            self._await()
            self._get_more()

    def _await(self) -> None:
        getting, self._getting = self._getting, None
        if getting is not None:
            getting.result()

    def _get(self, want: int, pass_index: int) -> None:
        found = self.client.call(lambda n: GetTasks(n, self.member.id, pass_index, want), Tasks)
        left_out = {chunk: ChunkOmissions(self.plan, chunk, what) for chunk, what in found.left_out}
        claims = [
            Claim((pass_index, c), int(self.plan.batches[c]), attempt, attempt=1, omissions=left_out.get(c))
            for c, attempt in found.tasks
        ]
        self._held |= {claim.key: claim.revision for claim in claims}
        self._known, self._told_pass = found.call, found.pass_index
        self._ahead.extend(claims)

    def _forget_others(self) -> None:
        """Tasks ahead that are of another pass than the trainer's: a shard has gone back meanwhile."""
        strange = [claim for claim in self._ahead if claim.key[0] != self.pace.pass_index]
        if strange:
            self._give_back(strange)
            for claim in strange:
                self._ahead.remove(claim)

    # -- what becomes of them -----------------------------------------------------------------------------------

    def complete(self, claims: list[Claim]) -> list[Claim]:
        """Told later. If a shard has gone back by then, the coordinator gives the tasks out again."""
        fences = self._fences()
        if fences is None:  # a shard is back, which has not said yet what it lacks
            self._background.run(functools.partial(self._give_back, claims))
        else:
            self._finished.append((claims, fences))
            self._background.run(self._finish)
        return claims

    def _finish(self) -> None:
        """In one call, what has gathered while another one was under way."""
        while self._finished:
            claims, fences = self._finished.popleft()
            while self._finished and self._finished[0][1] == fences:
                claims = claims + self._finished.popleft()[0]
            self._finish_at(claims, fences)

    def _finish_at(self, claims: list[Claim], fences: list[int]) -> None:
        for pass_index, some in by_pass((claim.key[0], claim) for claim in claims):
            tasks = [(claim.key[1], claim.revision) for claim in some]
            for chunk in self._tell(FinishTasks(0, self.member.id, pass_index, tasks, fences), some):
                log.info("chunk %d of pass %d is not ours to complete any more", chunk, pass_index)

    def _give_back(self, claims: list[Claim]) -> None:
        for pass_index, some in by_pass((claim.key[0], claim) for claim in claims):
            tasks = [(claim.key[1], claim.revision, claim.progress) for claim in some]
            self._tell(ReleaseTasks(0, self.member.id, pass_index, tasks), some)

    def _tell(self, message: FinishTasks | ReleaseTasks, claims: list[Claim]) -> list[int]:
        """The chunks that are others' by now. These claims are held no more."""
        try:
            answer = self.client.call(lambda number: msgspec.structs.replace(message, call=number), TasksSettled)
        except WorkChanged:
            return []  # the job is over: nothing is to be told of it
        finally:
            self._drop(claims)
        return answer.refused

    def _fences(self) -> list[int] | None:
        """The revision of each shard's record of the generation whose acknowledgements this trainer has; None if one is
        known to be in another."""
        known, fences = self.member.watcher.snapshot(), []
        for shard, generation in enumerate(self.generations()):
            kv = known.get(self.member.keys.of_shard(shard).generation)
            record = decode_generation(kv)
            if kv is None or record is None or record.number != generation:
                return None
            fences.append(kv.mod_revision)
        return fences

    def release(self, claims: list[Claim]) -> None:
        try:
            self._await()
            self._background.wait()
        except WorkChanged:
            return  # the job is over
        self._give_back([*claims, *self._ahead])
        self._ahead.clear()

    def fail(
        self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> Change | None:
        change = fail_task(self.client, *claim.key, claim.revision, batch, reason, records, certain)
        self._drop([claim])
        if change is not None:
            tell_left_out(self.member.events, *claim.key, change)
        return change

    def _drop(self, claims: list[Claim]) -> None:
        for claim in claims:
            if self._held.get(claim.key) == claim.revision:
                del self._held[claim.key]

    def close(self) -> None:
        self._background.close()

    # -- the daemon thread --------------------------------------------------------------------------------------

    def renew(self, timeout: float, mine: Mapping[ChunkKey, Claim]) -> None:
        now = time.monotonic()
        urgent = any(claim.renewed == float("-inf") for claim in list(mine.values()))
        if not (urgent or (now - self._renewed > timeout / 4 and self.pace.alive_since(self._renewed))):
            return
        known, held = self._known, list(self._held.items())  # in this order: what a call gave is held before
        progress = {key: claim.progress for key, claim in list(mine.items())}
        tasks = [(*key, attempt, progress.get(key, 0)) for key, attempt in held]
        if known:  # also if it holds nothing: what a lost answer gave is not to wait for its time-out
            self.client.cast(lambda _: RenewTasks(known, self.member.id, tasks))
        self._renewed = now
        for claim in list(mine.values()):
            claim.renewed = now
