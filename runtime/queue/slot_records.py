"""Where a sync trainer's claims are recorded: the port, and the records in etcd that trainers write themselves."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from graphft.ops.context import WorkChanged
from graphft.plan import Located
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import KV, get_op, value_is
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.protocol.left_out import ChunkOmissions
from graphft.runtime.queue.failed_batch import fail_batch
from graphft.runtime.queue.omissions import omissions_of
from graphft.runtime.queue.pace import Pace
from graphft.runtime.queue.stale_claims import LOOKS, StaleClaims
from graphft.runtime.queue.transactions import Passes, Terms, commit, give_back, renew

log = logging.getLogger("graphft")


@dataclass(slots=True)
class Claim:
    """A chunk that this trainer works on. `revision`: of the pending record's creation (or the number of the attempt,
    with a coordinator): the fence of its completion."""

    slot: int
    first_step: int
    last_step: int
    pass_index: int
    chunk: int
    revision: int
    touched: float


@dataclass(slots=True)
class Granted:
    """`revisions`: of the claims that were made, by pass and chunk. `left_out`: what is left out, by chunk."""

    revisions: dict[tuple[int, int], int] = field(default_factory=dict)
    left_out: dict[int, ChunkOmissions] = field(default_factory=dict)


class Shards(Protocol):
    """What the queue asks of the trainer's side of the data plane."""

    def lowest(self) -> int:
        """The lowest version among the shards; -1 while that is not known."""

    def slots(self) -> list[int]:
        """The slots that this trainer holds."""

    @property
    def generation(self) -> int:
        """The generation that its shards are in."""

    def claim_of(self, slot: int) -> int:
        """The revision of the claim of a slot."""


class SlotRecords(Protocol):
    """Records of claims. Each method may be called again after a failure: it looks before it changes."""

    def claim(self, slot: int, group: Sequence[Located]) -> Granted:
        """Claims these chunks of one pass for the slot. Raises WorkChanged when that is not this trainer's any more."""

    def complete(self, claims: Sequence[Claim]) -> None:
        """All their batches are applied. Those that are others' by now stay as they are."""

    def release(self, claims: Sequence[Claim]) -> None:
        """Gives them back. The slot's next holder goes on inside them."""

    def fail(
        self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> Change | None:
        """Counts a failure of a batch; None: the claim is another's by now."""

    def forget(self, claims: Sequence[Claim]) -> None:
        """They are the slot's next holder's to claim."""

    def tend(self, claims: Sequence[Claim], timeout: float) -> None:
        """Some times in `timeout` seconds: says that the own claims are worked on."""


class EtcdRecords(SlotRecords):
    """The queue's records in etcd, which every trainer reads and writes itself."""

    def __init__(self, member: Member, shards: Shards, pace: Pace) -> None:
        self.member, self.keys, self.plan = member, member.keys, member.config.plan
        self.shards, self.pace = shards, pace
        self.terms = Terms()
        self.passes = Passes(member)
        self._stale_claims = StaleClaims(member.etcd, member.keys, member.events)

    def claim(self, slot: int, group: Sequence[Located]) -> Granted:
        """A holder that vanished is not held against a chunk: no data is discarded for being preempted. Nothing is
        claimed of a job that is over: a trainer that has not heard of it would open a chunk again.
        """
        return self.member.retry_while_leased(lambda: self._claim(slot, group))

    def _claim(self, slot: int, group: Sequence[Located]) -> Granted:
        etcd, me, slot_key = self.member.etcd, self.member.id.encode(), self.keys.slot(slot)
        mine = [value_is(slot_key, me), value_is(self.keys.state, b"running")]
        granted = Granted()
        while True:
            wanted, left_over = self._read(group, granted)
            if not wanted and not left_over:
                return granted
            changes = left_over or [self._claim_of(slot, located, todo) for located, todo in wanted]
            result = commit(etcd, changes, self.member.lease, mine)
            if result.ok and not left_over:
                granted.revisions |= {(one.pass_index, one.chunk): result.revision for one, _ in wanted}
                return granted
            if not result.ok and not etcd.txn(mine, []).ok:
                raise WorkChanged

    def _read(self, group: Sequence[Located], granted: Granted) -> tuple[list[tuple[Located, KV]], list[Change]]:
        """Chunks that can be claimed, with their todo records; and what has to be done before others can."""
        prefix = self.keys.queue(group[0].pass_index)
        kinds = (chunk_queue.todo_key, chunk_queue.pending_key, chunk_queue.done_key)
        found = [
            [*(key(prefix, located.chunk) for key in kinds), self.keys.left_out(located.chunk)] for located in group
        ]
        read = self.member.etcd.txn([], [get_op(key) for keys in found for key in keys])
        wanted, left_over = [], []
        for i, located in enumerate(group):
            todo, pending, done, left_out = (read.kv(len(found[i]) * i + j) for j in range(len(found[i])))
            if left_out is not None:
                granted.left_out[located.chunk] = omissions_of(self.plan, left_out)
            if pending is not None:  # of another holder (or an earlier claim): it holds no slot now
                left_over.append(chunk_queue.displace(prefix, located.chunk, pending))
            elif todo is None:  # done in a generation that was rolled back
                left_over.append(chunk_queue.requeue(prefix, located.chunk, done, 0))
            else:
                wanted.append((located, todo))
        return wanted, left_over

    def _claim_of(self, slot: int, located: Located, todo: KV) -> Change:
        return chunk_queue.claim(
            self.keys.queue(located.pass_index),
            located.chunk,
            todo,
            trainer=self.member.id,
            slot=slot,
            start_step=located.chunk_start_step,
            now=time.time(),
            **self.terms._asdict(),
        )

    def complete(self, claims: Sequence[Claim]) -> None:
        """Those that were claimed in one transaction are completed in one."""
        together: dict[tuple[int, int], list[Claim]] = {}
        for claim in claims:
            together.setdefault((claim.pass_index, claim.revision), []).append(claim)
        for group in together.values():
            self.member.retry_while_leased(functools.partial(self._complete, group))

    def _complete(self, claims: Sequence[Claim]) -> None:
        prefix = self.keys.queue(claims[0].pass_index)
        changes = [chunk_queue.complete(prefix, claim.chunk, claim.revision) for claim in claims]
        if commit(self.member.etcd, changes).ok:
            return
        for claim, change in zip(claims, changes, strict=True):
            if not commit(self.member.etcd, [change]).ok:
                log.info("chunk %d is not ours to complete any more", claim.chunk)

    def release(self, claims: Sequence[Claim]) -> None:
        lowest = self.shards.lowest()
        for pass_index in {claim.pass_index for claim in claims}:
            held = {claim.chunk: claim for claim in claims if claim.pass_index == pass_index}
            self._give_back(self.keys.queue(pass_index), held, lowest)

    def _give_back(self, prefix: str, held: Mapping[int, Claim], lowest: int) -> None:
        def change(chunk: int, todo: KV) -> Change:
            progress = max(0, lowest - held[chunk].first_step)
            return chunk_queue.release(prefix, chunk, held[chunk].revision, todo, progress=progress)

        fences = {chunk: claim.revision for chunk, claim in held.items()}
        self.member.retry_while_leased(lambda: give_back(self.member.etcd, prefix, fences, change))

    def forget(self, claims: Sequence[Claim]) -> None:
        """Their records go with the next claim."""

    def fail(
        self, claim: Claim, batch: int, reason: str, records: Collection[int] = (), certain: bool = False
    ) -> Change | None:
        return self.member.retry_while_leased(
            lambda: fail_batch(
                self.member.etcd,
                self.keys,
                self.plan,
                claim.pass_index,
                claim.chunk,
                batch,
                claim=claim.revision,
                reason=reason,
                records=records,
                certain=certain,
            )
        )

    def tend(self, claims: Sequence[Claim], timeout: float) -> None:
        """Renews the own claims while steps are computed, or others are waited for, and takes away what others have not
        renewed."""
        now = time.monotonic()
        for claim in claims:
            if now - claim.touched > timeout / 4 and self.pace.alive_since(claim.touched):
                claim.touched = now
                progress = max(0, self.shards.lowest() - claim.first_step)
                renew(
                    self.member.etcd,
                    self.keys.queue(claim.pass_index),
                    claim.chunk,
                    claim.revision,
                    progress=progress,
                    timeout=timeout,
                    lease=self.member.lease,
                )
        held = {claim.revision for claim in claims}
        self._stale_claims.look(max(self.pace.pass_index, 0), timeout, held)
        self.passes.let_go(timeout / LOOKS)
