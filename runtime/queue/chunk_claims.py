"""Chunks that an async trainer claims from etcd's records, and what becomes of them there.

Finding work: one transaction reads the todo and pending records of a random range of 100 chunks; the free ones are
shuffled, and a few are claimed in one transaction. A range without todo records is not looked at again in this pass;
when none is left the pass is over, unless `/<job>/pass` was written meanwhile: a shard that comes back older puts
chunks back to todo, and then writes it.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from graphft.ops.context import EndOfPass, NoData
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassRecord, decode_generation, decode_pass
from graphft.runtime.etcd import KV, Compare, get_op, mod_is, range_op
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.async_events import ChunkKey
from graphft.runtime.protocol.chunk_queue import Change, Known, Todo
from graphft.runtime.protocol.left_out import ChunkOmissions
from graphft.runtime.queue.failed_batch import fail_batch, or_end
from graphft.runtime.queue.omissions import omissions_of
from graphft.runtime.queue.pace import Pace
from graphft.runtime.queue.stale_claims import LOOKS, StaleClaims
from graphft.runtime.queue.transactions import Passes, Terms, commit, give_back, renew, tell_left_out

log = logging.getLogger("graphft")

RANGE = 100
"""Chunks that one look at the queue covers: those whose numbers differ in the last two digits only."""
CLAIM_BATCHES = 16
"""Short chunks are claimed several at a time, until there are so many batches."""
LOST_CLAIMS = 10
"""Holders that vanished (perhaps preempted) are held against a chunk `LOST_CLAIMS` times less than an error of its."""


@dataclass(slots=True)
class Claim:
    """A chunk that this trainer works on. `revision`: of the pending record's creation, the fence of what relies on it;
    0 without fault tolerance. `last`: the batch that was computed last. `omissions`: what is left out of the chunk."""

    key: ChunkKey
    batches: int
    revision: int = 0
    attempt: int = 0
    last: int = -1
    renewed: float = 0.0
    progress: int = 0
    omissions: ChunkOmissions | None = None

    @property
    def left_out(self) -> frozenset[int]:
        """Batches that no shard is to have."""
        return self.omissions.batches(self.key[0]) if self.omissions is not None else frozenset()


class Claims:
    """Chunks claimed from etcd's records. `generations`: each shard's, in which its acknowledgements were given."""

    def __init__(self, member: Member, pace: Pace, generations: Callable[[], list[int]], terms: Terms) -> None:
        self.member, self.pace, self.generations = member, pace, generations
        self.etcd, self.keys, self.config = self.member.etcd, self.member.keys, self.member.config
        self.plan = self.config.plan
        self.passes = Passes(self.member)
        self.stale_claims = StaleClaims(self.etcd, self.keys, self.member.events)
        self.terms = terms
        self._random = random.Random(self.member.id)
        self._marker: KV | None = None
        self._open: list[str] = []
        """Beginnings of the chunk numbers that may have todo records, in this trainer's order."""

    # -- passes -------------------------------------------------------------------------------------------------

    def enqueue(self, index: int) -> None:
        if self.passes.enqueue(index, functools.partial(_follows, index), lambda: None):
            self._forget_old()
            log.info("pass %d begins", index) if index < self.plan.passes else log.info("all passes are done")

    def _forget_old(self) -> None:
        """Deletes what is done in passes that every shard's checkpoint holds: no shard will ever requeue it.

        The last pass's stays, for the status of a job that is complete.
        """
        saved = [c.passes for c in self.member.view.shard_commits.values()]
        for index in range(min(*saved, self.plan.passes - 1) if len(saved) == self.config.pservers else 0):
            self.member.retry_while_leased(functools.partial(self.etcd.delete_prefix, f"{self.keys.queue(index)}done/"))

    # -- taking chunks ------------------------------------------------------------------------------------------

    def take(self) -> list[Claim]:
        return self.member.retry_while_leased(self._take)

    def _take(self) -> list[Claim]:
        while True:
            for start in list(self._open):
                claims = self._look(start)
                if claims is None:
                    break
                if claims:
                    return claims
            marker = self.etcd.get(self.keys.pass_)
            if marker != self._marker:
                self._begin(marker)
                if _pass(marker) != self.pace.pass_index:
                    raise EndOfPass
            elif self._open or self.pace.pass_index >= self.plan.passes:
                raise NoData  # others hold what is left
            else:
                raise EndOfPass

    def next_pass(self) -> int:
        """The pass to go on with at the end of the trainer's own: the recorded one, or if it is that, the next."""
        recorded = _pass(self._marker)
        return recorded + 1 if recorded == self.pace.pass_index else recorded

    def _begin(self, marker: KV | None) -> None:
        """The pass is another, or chunks were put back: every range is to be looked at (again)."""
        self._marker = marker
        ranges = -(-len(self.plan.records) // RANGE) if 0 <= _pass(marker) < self.plan.passes else 0
        self._open = [f"{b:06d}" for b in range(ranges)]
        self._random.shuffle(self._open)

    def _look(self, start: str) -> list[Claim] | None:
        """One range: claims some of it, or notes that nothing is left to do there. None: the pass changed."""
        index = _pass(self._marker)
        prefix = self.keys.queue(index)
        read = self.etcd.txn(
            [],
            [
                get_op(self.keys.pass_),
                range_op(f"{prefix}todo/{start}"),
                range_op(f"{prefix}pending/{start}", keys_only=True),
                range_op(f"{self.keys.all_left_out}{start}"),
            ],
        )
        if read.kv(0) != self._marker:
            return None
        todo = {chunk_queue.chunk_of(kv.key): kv for kv in read.range(1).kvs}
        if not todo:
            self._open.remove(start)
        free = chunk_queue.claimable(todo, (chunk_queue.chunk_of(kv.key) for kv in read.range(2).kvs))
        self._random.shuffle(free)
        left_out = {chunk_queue.chunk_of(kv.key): kv for kv in read.range(3).kvs}
        return self._claim(index, {c: (todo[c], left_out.get(c)) for c in free[: self._enough(free)]}) if free else []

    def _enough(self, free: list[int]) -> int:
        """How many chunks to claim: more than one when they are short, and about a fair share of the rest at most."""
        count, batches = 0, 0
        while count < len(free) and batches < CLAIM_BATCHES:
            batches += int(self.plan.batches[free[count]])
            count += 1
        share = len(free) * len(self._open) // max(1, len(self.member.view.trainers))
        return max(1, min(count, share))

    def _claim(self, index: int, records: Mapping[int, tuple[KV, KV | None]]) -> list[Claim]:
        """`records`: by chunk, its todo record, and what is left out of it."""
        changes = {chunk: self._claim_of(index, chunk, *found) for chunk, found in records.items()}
        result = commit(self.etcd, list(changes.values()), self.member.lease)
        if not result.ok:
            return []  # somebody else was faster with one of them
        claims = []
        for chunk, change in changes.items():
            if change.outcome != "claimed":
                tell_left_out(self.member.events, index, chunk, change)
                continue
            todo, left_out = records[chunk]
            claims.append(
                Claim(
                    (index, chunk),
                    int(self.plan.batches[chunk]),
                    result.revision,
                    msgspec.json.decode(todo.value, type=Todo).attempt + 1,
                    renewed=time.monotonic(),
                    omissions=omissions_of(self.plan, left_out) if left_out is not None else None,
                )
            )
        return claims

    def _claim_of(self, index: int, chunk: int, todo: KV, left_out: KV | None) -> Change:
        known = Known(self.keys.left_out(chunk), index, left_out)
        change = chunk_queue.claim(
            self.keys.queue(index),
            chunk,
            todo,
            trainer=self.member.id,
            now=time.time(),
            progress=msgspec.json.decode(todo.value, type=Todo).progress,
            lost=(LOST_CLAIMS * self.terms.max_failures, known),
            **self.terms._asdict(),
        )
        return or_end(self.etcd, self.keys, self.plan, known, change, self.terms.max_discarded)

    # -- what becomes of them -----------------------------------------------------------------------------------

    def complete(self, claims: list[Claim]) -> list[Claim]:
        if self.member.retry_while_leased(functools.partial(self._complete, claims)):
            return claims
        return [
            c
            for c in claims
            if self.member.retry_while_leased(functools.partial(self._complete, [c])) or not self._mine(c)
        ]

    def _complete(self, claims: list[Claim]) -> bool:
        """One transaction, carried out only while no shard has gone back since it acknowledged these chunks."""
        fences = self._generations()
        if fences is None:
            return False  # a shard is back, which has not said yet what it lacks
        return commit(
            self.etcd,
            [chunk_queue.complete(self.keys.queue(c.key[0]), c.key[1], c.revision) for c in claims],
            also=fences,
        ).ok

    def _mine(self, claim: Claim) -> bool:
        pending = self.member.retry_while_leased(
            functools.partial(self.etcd.get, chunk_queue.pending_key(self.keys.queue(claim.key[0]), claim.key[1]))
        )
        if pending is not None and pending.create_revision == claim.revision:
            return True
        log.info("chunk %d of pass %d is not ours to complete any more", claim.key[1], claim.key[0])
        return False

    def _generations(self) -> list[Compare] | None:
        """That each shard is in the generation whose acknowledgements this trainer has; None if one is known not to."""
        known, fences = self.member.watcher.snapshot(), []
        for shard, generation in enumerate(self.generations()):
            kv = known.get(self.keys.of_shard(shard).generation)
            record = decode_generation(kv)
            if kv is None or record is None or record.number != generation:
                return None
            fences.append(mod_is(kv.key, kv.mod_revision))
        return fences

    def release(self, claims: list[Claim]) -> None:
        for claim in claims:
            self._release(claim)

    def _release(self, claim: Claim) -> None:
        prefix, chunk = self.keys.queue(claim.key[0]), claim.key[1]
        self.member.retry_while_leased(
            lambda: give_back(
                self.etcd,
                prefix,
                {chunk: claim.revision},
                lambda _, todo: chunk_queue.release(prefix, chunk, claim.revision, todo, progress=claim.progress),
            )
        )

    def fail(
        self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> Change | None:
        """None: the claim is another trainer's by now."""
        make = functools.partial(
            fail_batch,
            self.etcd,
            self.keys,
            self.plan,
            *claim.key,
            batch,
            claim=claim.revision,
            reason=reason,
            records=records,
            certain=certain,
        )
        change = self.member.retry_while_leased(make)
        if change is not None:
            tell_left_out(self.member.events, *claim.key, change)
        return change

    # -- the daemon thread --------------------------------------------------------------------------------------

    def renew(self, timeout: float, mine: Mapping[ChunkKey, Claim]) -> None:
        """Renews the own claims while batches are computed, and takes away what others have not renewed."""
        now = time.monotonic()
        for claim in list(mine.values()):
            if now - claim.renewed > timeout / 4 and self.pace.alive_since(claim.renewed):
                claim.renewed = now
                renew(
                    self.etcd,
                    self.keys.queue(claim.key[0]),
                    claim.key[1],
                    claim.revision,
                    progress=claim.progress,
                    timeout=timeout,
                    lease=self.member.lease,
                )
        index = _pass(self.member.watcher.snapshot().get(self.keys.pass_))
        if 0 <= index < self.plan.passes:
            self.stale_claims.look(index, timeout, {claim.revision for claim in list(mine.values())})
        self.passes.let_go(timeout / LOOKS)


def _pass(marker: KV | None) -> int:
    record = decode_pass(marker)
    return record.pass_index if record is not None else -1


def _follows(index: int, current: PassRecord | None) -> bool:
    return (current.pass_index if current is not None else -1) == index - 1
