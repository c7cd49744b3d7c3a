"""The chunk queue in etcd, whose records every trainer reads and writes itself.

Sync: a slot's chunks are claimed under the slot's key. Async: one transaction reads the todo and pending records of a
random range of 100 chunks; a second one claims a few of the free ones. A range without todo records is not looked at
again in this pass; when none is left the pass is over, unless `/<job>/pass` has changed: a shard that went back puts
chunks back to todo, and then writes it.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from graphft.ops.context import ClaimTerms, EndOfPass, NoData, WorkChanged
from graphft.plan import Located
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassRecord, decode
from graphft.runtime.etcd import KV, Compare, get_op, mod_is, range_op, value_is
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import LOST_CLAIMS, Change, ChunkDiscards, Known, discards_of
from graphft.runtime.queue.chunk_queue import (
    CLAIM_BATCHES,
    ChunkQueue,
    Claim,
    OpenQueue,
    Pace,
    SlotQueue,
    by_pass,
    shard_generations,
)
from graphft.runtime.queue.passes import Passes, close_pass
from graphft.runtime.queue.sync_queue import Shards
from graphft.runtime.queue.transactions import StaleClaims, commit, fail_batch, give_back, or_end, renew, tell_discarded

log = logging.getLogger("graphft")

RANGE = 100
"""Chunks that one look at the queue covers: their numbers differ in the last two digits only."""
T = TypeVar("T")


class EtcdQueue(ChunkQueue):
    """Common base of the queues of sync and async trainers."""

    def __init__(self, member: Member, pace: Pace) -> None:
        self.member, self.etcd, self.keys = member, member.etcd, member.keys
        self.plan, self.pace = member.config.plan, pace
        self.passes = Passes(member)
        self._stale_claims = StaleClaims(member.etcd, member.keys, member.events)

    def _retry(self, call: Callable[[], T]) -> T:
        return self.member.retry_while_leased(call)

    def _fences(self) -> list[Compare] | None:
        """Returns what a completion compares beside its claims; None if that is known not to hold."""
        return []

    def complete(self, claims: Sequence[Claim]) -> list[Claim]:
        """Completes in one transaction what was claimed in one."""
        together: dict[tuple[int, int], list[Claim]] = {}
        for claim in claims:
            together.setdefault((claim.key[0], claim.revision), []).append(claim)
        settled = []
        for group in together.values():
            if self._completed(group):
                settled += group
            else:
                settled += [c for c in group if self._completed([c]) or not self._is_mine(c)]
        return settled

    def _completed(self, claims: Sequence[Claim]) -> bool:
        fences = self._fences()
        if fences is None:
            return False
        changes = [chunk_queue.complete(self.keys.queue(c.key[0]), c.key[1], c.revision) for c in claims]
        return self._retry(lambda: commit(self.etcd, changes, also=fences)).ok

    def _is_mine(self, claim: Claim) -> bool:
        index, chunk = claim.key
        pending = self._retry(lambda: self.etcd.get(chunk_queue.pending_key(self.keys.queue(index), chunk)))
        if pending is not None and pending.create_revision == claim.revision:
            return True
        log.info("chunk %d of pass %d is not ours to complete any more", chunk, index)
        return False

    def release(self, claims: Sequence[Claim]) -> None:
        for index, some in by_pass(claims):
            self._release(self.keys.queue(index), {claim.key[1]: claim for claim in some})

    def _release(self, prefix: str, held: Mapping[int, Claim]) -> None:
        def change(chunk: int, todo: KV) -> Change:
            new = chunk_queue.decode_todo(todo).released(held[chunk].progress)
            return chunk_queue.put_back(prefix, chunk, held[chunk].revision, todo, new)

        fences = {chunk: claim.revision for chunk, claim in held.items()}
        self._retry(lambda: give_back(self.etcd, prefix, fences, change))

    def fail(self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False) -> bool:
        make = functools.partial(fail_batch, self.etcd, self.keys, self.plan, *claim.key, batch, claim=claim.revision)
        change = self._retry(functools.partial(make, reason=reason, records=records, certain=certain))
        if change is not None:
            tell_discarded(self.member.events, *claim.key, change)
        return change is not None

    def renew(self, claims: Sequence[Claim], timeout: float) -> None:
        """Also takes away what others have not renewed."""
        now = time.monotonic()
        for claim in claims:
            if now - claim.renewed > timeout / 4 and self.pace.alive_since(claim.renewed):
                claim.renewed = now
                prefix, chunk = self.keys.queue(claim.key[0]), claim.key[1]
                renew(self.etcd, prefix, chunk, claim.revision, self.member.lease, progress=claim.progress)
        record = self.member.view.pass_
        if record is not None and record.pass_index < self.plan.passes:
            self._stale_claims.look(record.pass_index, timeout, {claim.revision for claim in claims})


class EtcdSlotQueue(EtcdQueue, SlotQueue):
    """The queue of a sync trainer."""

    def __init__(self, member: Member, shards: Shards, pace: Pace) -> None:
        super().__init__(member, pace)
        self.shards = shards
        self._kept = 0
        """The first pass whose records this process has not deleted."""

    # -- passes -------------------------------------------------------------------------------------------------

    def begin_pass(self, index: int) -> None:
        """Makes the pass's todo records, then `/<job>/pass`, which makes them count."""
        close_before = functools.partial(self._close_before, index)
        if self.passes.enqueue(index, lambda now: now is None or now.pass_index != index, close_before):
            self._forget_before(index)

    def _close_before(self, index: int) -> None:
        """Closes the last passes before `index` if every shard has applied them, but for what trainers have claimed:
        they complete that themselves, or the next pass that begins closes it."""
        for old in range(max(self._kept, index - 2), index):
            if self.shards.lowest() >= self.plan.start_steps[old + 1]:
                close_pass(self.etcd, self.keys, self.plan, old, pending=False)

    def _forget_before(self, index: int) -> None:
        """Deletes the records of passes before the last two, but of none that the job may go back to."""
        committed = self.member.view.committed
        saved = self.plan.pass_of(committed.step) if committed is not None else 0
        old, self._kept = self._kept, max(self._kept, min(index - 1, saved))
        for gone in range(old, self._kept):
            self._retry(functools.partial(self.etcd.delete_prefix, self.keys.queue(gone)))

    # -- claims -------------------------------------------------------------------------------------------------

    def claim(self, slot: int, group: Sequence[Located], terms: ClaimTerms) -> list[Claim]:
        """Claims under the slot's key, while the job runs. Holders that vanished do not count as failures."""
        return self._retry(functools.partial(self._claim, slot, group, terms))

    def _claim(self, slot: int, group: Sequence[Located], terms: ClaimTerms) -> list[Claim]:
        mine = [value_is(self.keys.slot(slot), self.member.id.encode()), value_is(self.keys.state, b"running")]
        while True:
            wanted, left_over = self._read(group)
            changes = left_over or [self._claim_of(slot, located, todo, terms) for located, todo, _ in wanted]
            result = commit(self.etcd, changes, self.member.lease, mine)
            if result.ok and not left_over:
                return [self._made(slot, one, result.revision, discards) for one, _, discards in wanted]
            if not result.ok and not self.etcd.txn(mine, []).ok:
                raise WorkChanged

    def _read(self, group: Sequence[Located]) -> tuple[list[tuple[Located, KV, ChunkDiscards | None]], list[Change]]:
        """Returns the chunks that can be claimed, with their todo records; and what must change before others can."""
        prefix = self.keys.queue(group[0].pass_index)
        kinds = (chunk_queue.todo_key, chunk_queue.pending_key, chunk_queue.done_key)
        found = [[*(key(prefix, one.chunk) for key in kinds), self.keys.discarded(one.chunk)] for one in group]
        read = self.etcd.txn([], [get_op(key) for keys in found for key in keys])
        wanted, left_over = [], []
        for i, located in enumerate(group):
            todo, pending, done, discarded = (read.kv(len(found[i]) * i + j) for j in range(len(found[i])))
            if pending is not None:  # of another holder (or an earlier claim): it holds no slot now
                left_over.append(chunk_queue.displace(prefix, located.chunk, pending))
            elif todo is None:  # done in a generation that was rolled back
                left_over.append(chunk_queue.requeue(prefix, located.chunk, done, 0))
            else:
                wanted.append((located, todo, discards_of(self.plan, discarded)))
        return wanted, left_over

    def _claim_of(self, slot: int, located: Located, todo: KV, terms: ClaimTerms) -> Change:
        return chunk_queue.claim(
            self.keys.queue(located.pass_index),
            located.chunk,
            todo,
            trainer=self.member.id,
            slot=slot,
            **terms._asdict(),
        )

    def _made(self, slot: int, located: Located, revision: int, discards: ChunkDiscards | None) -> Claim:
        key, batches = (located.pass_index, located.chunk), int(self.plan.batches[located.chunk])
        return Claim(key, batches, revision, slot=slot, first_step=located.chunk_start_step, discards=discards)


class EtcdOpenQueue(EtcdQueue, OpenQueue):
    """The queue of an async trainer. `generations`: of each shard, that of its acknowledgements."""

    def __init__(self, member: Member, pace: Pace, generations: Callable[[], list[int]]) -> None:
        super().__init__(member, pace)
        self.generations = generations
        self._random = random.Random(self.member.id)
        self._marker: KV | None = None
        self._open: list[str] = []
        """Beginnings of the chunk numbers that may have todo records, in this trainer's order."""

    # -- passes -------------------------------------------------------------------------------------------------

    def begin_pass(self, index: int) -> None:
        if self.passes.enqueue(index, lambda now: (now.pass_index if now is not None else -1) == index - 1):
            self._forget_old()
            log.info("pass %d begins", index) if index < self.plan.passes else log.info("all passes are done")

    def _forget_old(self) -> None:
        """Deletes what is done in passes that every shard's checkpoint holds, and that none can requeue; the last pass
        stays for the status of a complete job."""
        saved = [c.passes for c in self.member.view.shard_commits.values()]
        for index in range(min(*saved, self.plan.passes - 1) if len(saved) == self.member.config.pservers else 0):
            self._retry(functools.partial(self.etcd.delete_prefix, f"{self.keys.queue(index)}done/"))

    def next_pass(self) -> int:
        """Returns the recorded pass, or the next one if the trainer's own is recorded."""
        recorded = _pass(self._marker)
        return recorded + 1 if recorded == self.pace.pass_index else recorded

    # -- claims -------------------------------------------------------------------------------------------------

    def take(self, terms: ClaimTerms) -> list[Claim]:
        return self._retry(functools.partial(self._take, terms))

    def _take(self, terms: ClaimTerms) -> list[Claim]:
        while True:
            for start in list(self._open):
                claims = self._look(start, terms)
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

    def _begin(self, marker: KV | None) -> None:
        """Has every range looked at (again): the pass is another, or chunks were put back."""
        self._marker = marker
        ranges = -(-len(self.plan.records) // RANGE) if 0 <= _pass(marker) < self.plan.passes else 0
        self._open = [f"{b:06d}" for b in range(ranges)]
        self._random.shuffle(self._open)

    def _look(self, start: str, terms: ClaimTerms) -> list[Claim] | None:
        """Claims some of a range, or notes that nothing is left there. None: the pass has changed."""
        index = _pass(self._marker)
        prefix = self.keys.queue(index)
        read = self.etcd.txn(
            [],
            [
                get_op(self.keys.pass_),
                range_op(f"{prefix}todo/{start}"),
                range_op(f"{prefix}pending/{start}", keys_only=True),
                range_op(f"{self.keys.all_discarded}{start}"),
            ],
        )
        if read.kv(0) != self._marker:
            return None
        todo = {chunk_queue.chunk_of(kv.key): kv for kv in read.range(1).kvs}
        if not todo:
            self._open.remove(start)
        free = sorted(todo.keys() - {chunk_queue.chunk_of(kv.key) for kv in read.range(2).kvs})
        self._random.shuffle(free)
        discarded = {chunk_queue.chunk_of(kv.key): kv for kv in read.range(3).kvs}
        records = {c: (todo[c], discarded.get(c)) for c in free[: self._enough(free)]}
        return self._claim(index, records, terms) if free else []

    def _enough(self, free: list[int]) -> int:
        """Returns the number of chunks to claim: several short ones, but at most about a fair share of the rest."""
        count, batches = 0, 0
        while count < len(free) and batches < CLAIM_BATCHES:
            batches += int(self.plan.batches[free[count]])
            count += 1
        share = len(free) * len(self._open) // max(1, len(self.member.view.trainers))
        return max(1, min(count, share))

    def _claim(self, index: int, records: Mapping[int, tuple[KV, KV | None]], terms: ClaimTerms) -> list[Claim]:
        """`records`: by chunk, its todo record and its Discards."""
        changes = {chunk: self._claim_of(index, chunk, *found, terms) for chunk, found in records.items()}
        result = commit(self.etcd, list(changes.values()), self.member.lease)
        if not result.ok:
            return []  # somebody else was faster with one of them
        claims = []
        for chunk, change in changes.items():
            if change.outcome != "claimed":
                tell_discarded(self.member.events, index, chunk, change)
                continue
            todo, discarded = records[chunk]
            attempt = chunk_queue.decode_todo(todo).attempt + 1
            batches, discards = int(self.plan.batches[chunk]), discards_of(self.plan, discarded)
            claims.append(Claim((index, chunk), batches, result.revision, attempt, discards=discards))
        return claims

    def _claim_of(self, index: int, chunk: int, todo: KV, discarded: KV | None, terms: ClaimTerms) -> Change:
        known = Known(self.keys.discarded(chunk), index, discarded)
        change = chunk_queue.claim(
            self.keys.queue(index),
            chunk,
            todo,
            trainer=self.member.id,
            progress=chunk_queue.decode_todo(todo).progress,
            lost=(LOST_CLAIMS * terms.max_failures, known),
            **terms._asdict(),
        )
        return or_end(self.etcd, self.keys, self.plan, known, change, terms.max_discarded)

    def _fences(self) -> list[Compare] | None:
        """Compares that no shard has gone back since it acknowledged the chunks."""
        found = shard_generations(self.member, self.generations())
        return [mod_is(kv.key, kv.mod_revision) for kv in found] if found is not None else None


def _pass(marker: KV | None) -> int:
    record = decode(marker, PassRecord)
    return record.pass_index if record is not None else -1
