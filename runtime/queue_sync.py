"""The chunk queue of sync training: etcd's record of how far each slot is in the pass plan.

Which chunk a slot works on follows from the plan, so claims never contend; the records say what is todo, pending,
done and failed, count failures, and let anybody see them. One key per chunk:

    todo/<chunk>     {attempt, failures, failed_step}     stays until the chunk is done or failed
    pending/<chunk>  {trainer, slot, start_step}          on the holder's lease: gone when the holder is
    done/<chunk>     {}
    failed/<chunk>   {reason, failures, step}             poison: contributes "empty" from this step on, in all passes
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from graphft.ops.context import ChunkWork, NoData, WorkChanged
from graphft.plan import Located, batch_seed
from graphft.runtime.etcd import KV, absent, create_is, delete_op, get_op, mod_is, put_op, value_is
from graphft.runtime.roles.base import log

if TYPE_CHECKING:
    from graphft.runtime.protocol.sync_events import Work
    from graphft.runtime.roles.trainer_sync import SlotTrainer

PER_TRANSACTION = 100


class Todo(msgspec.Struct, frozen=True):
    """`attempt` counts claims; `failures` those failures in a row that came without progress since `failed_step`."""

    attempt: int = 0
    failures: int = 0
    failed_step: int = -1


class Pending(msgspec.Struct, frozen=True):
    """Who works on a chunk: the data offset inside it at step k is k - start_step."""

    trainer: str
    slot: int
    start_step: int
    attempt: int


class PassRecord(msgspec.Struct, frozen=True, rename={"pass_index": "pass"}):
    """The value of `/<job>/pass`: the pass whose records are whole."""

    pass_index: int
    chunks: int
    start_step: int


class Failed(msgspec.Struct, frozen=True):
    reason: str
    failures: int
    step: int


@dataclass(slots=True)
class Claim:
    """A chunk that this trainer works on. `revision`: of the pending record's creation, the fence of its completion."""

    slot: int
    last_step: int
    pass_index: int
    chunk: int
    revision: int
    touched: float


class PlanQueue:
    """The QueuePort of a sync trainer. With `ft` false it only consults the plan, and records nothing."""

    def __init__(self, trainer: SlotTrainer) -> None:
        self.trainer, self.keys, self.plan = trainer, trainer.keys, trainer.config.plan
        self.records = trainer.config.ft
        self.claims: dict[tuple[int, int], Claim] = {}
        """By pass and chunk. A slot's next chunk is claimed before the last batch of the one before is applied."""
        self._discarded: dict[tuple[int, int], int] = {}
        """(pass, chunk) -> the step from which on it is left out: what came before stays exact over rollbacks."""
        self._seen: dict[str, tuple[int, float]] = {}
        self._closed = False

    # -- QueuePort ----------------------------------------------------------------------------------------------

    def get_chunk(self) -> ChunkWork:
        ctx = self.trainer.ctx
        located = self.plan.locate(ctx.step, ctx.slot)
        if located is None or self._left_out(located):
            raise NoData
        revision = 0
        if self.records:
            revision = self._claim(ctx.slot, located)
        return ChunkWork(located.pass_index, located.chunk, located.batch, located.samples,
                         batch_seed(self.trainer.config.seed, ctx.step, ctx.slot), claim=revision)

    def complete_chunks(self) -> None:
        if not self.records:
            return
        lowest = self.trainer.comm.lowest()
        for key, claim in list(self.claims.items()):
            if claim.last_step < lowest:
                self.trainer.patiently(functools.partial(self._complete, claim))
                del self.claims[key]

    def enqueue_pass(self) -> None:
        """Makes the pass's todo records, then `/<job>/pass`, which makes them count. One trainer at a time tries."""
        index = self.plan.pass_of(self.trainer.ctx.step)
        self.trainer.patiently(lambda: self._enqueue(index))
        failed = self.trainer.patiently(lambda: self.trainer.etcd.range(f"{self.keys.queue(index)}failed/")).kvs
        self._discarded |= {(index, int(kv.key.rsplit("/", 1)[1])): _failed(kv).step for kv in failed}

    def requeue_overdue(self, timeout: float, max_failures: int) -> None:
        """Touches the own pending records (they are alive), and takes those away that nobody touched for `timeout`.

        Age is measured on this process's own clock, since it saw the record change: no two clocks are compared.
        """
        now = time.monotonic()
        for claim in list(self.claims.values()):
            if now - claim.touched > timeout / 4 and self.trainer.busy_since(claim.touched):
                claim.touched = now
                self._touch(claim)
        index = max(self.trainer.pass_index, 0)
        pending = self.trainer.etcd.range(f"{self.keys.queue(index)}pending/").kvs
        seen = {kv.key: self._seen.get(kv.key, (0, now)) for kv in pending}
        self._seen = {kv.key: seen[kv.key] if seen[kv.key][0] == kv.mod_revision else (kv.mod_revision, now)
                      for kv in pending}
        for kv in pending:
            if now - self._seen[kv.key][1] > timeout:
                self._take_away(kv, timeout)

    # -- for the trainer ----------------------------------------------------------------------------------------

    def release(self, slot: int) -> None:
        """Gives the slot's chunks back; its next holder goes on inside them."""
        for claim in [c for c in self.claims.values() if c.slot == slot]:
            key = f"{self.keys.queue(claim.pass_index)}pending/{claim.chunk}"
            self.trainer.patiently(functools.partial(
                self.trainer.etcd.txn, [create_is(key, claim.revision)], [delete_op(key)]))
            del self.claims[claim.pass_index, claim.chunk]

    def rolled_back(self) -> None:
        """A new generation began: what is pending is what the plan says of its first step."""
        for slot in {claim.slot for claim in self.claims.values()}:
            self.release(slot)

    def report_failure(self, work: Work, reason: str) -> None:
        """Counts a failure of the chunk at (step, slot); too many in a row without progress make it poison."""
        located = self.plan.locate(work.step, work.slot)
        if not self.records or located is None:
            return
        prefix = self.keys.queue(located.pass_index)
        todo_key = f"{prefix}todo/{located.chunk}"
        kv = self.trainer.etcd.get(todo_key)
        todo = _todo(kv)
        failures = todo.failures + 1 if todo.failed_step == work.step else 1
        if failures < self.trainer.config.max_failures:
            op = put_op(todo_key, msgspec.json.encode(Todo(todo.attempt, failures, work.step)))
            self.trainer.etcd.txn([mod_is(todo_key, kv.mod_revision if kv else 0)], [op], token=todo_key)
            return
        failed = put_op(f"{prefix}failed/{located.chunk}", msgspec.json.encode(Failed(reason, failures, work.step)))
        self.trainer.etcd.txn([], [delete_op(todo_key), delete_op(f"{prefix}pending/{located.chunk}"), failed],
                              token=failed.key)
        self.trainer.events.emit("poison", f"chunk {located.chunk} of pass {located.pass_index} is DISCARDED from step "
                                           f"{work.step} on: it failed {failures} times in a row ({reason})",
                                 chunk=located.chunk, pass_index=located.pass_index)

    def complete_job(self) -> None:
        """The last step is applied: every chunk of the last pass that is not poison is done. Once."""
        self.claims.clear()
        if self.records and not self._closed:
            self._closed = True
            self.trainer.patiently(lambda: self._close(self.plan.passes - 1))

    # -- transactions -------------------------------------------------------------------------------------------

    def _left_out(self, located: Located) -> bool:
        step = self._discarded.get((located.pass_index, located.chunk))
        return step is not None and located.chunk_start_step + located.batch >= step

    def _claim(self, slot: int, located: Located) -> int:
        """The revision of the claim, new if there is none. 0 for a chunk that is left out, but later than here."""
        key = located.pass_index, located.chunk
        if key not in self.claims and key not in self._discarded:
            claim = self.trainer.patiently(lambda: self._try_claim(slot, located))
            if claim is not None:
                self.claims[key] = claim
            elif self._left_out(located):
                raise NoData
        return self.claims[key].revision if key in self.claims else 0

    def _try_claim(self, slot: int, located: Located) -> Claim | None:
        """The claim; None when the chunk is poison. Raises WorkChanged when the slot is not ours any more."""
        etcd, prefix, me = self.trainer.etcd, self.keys.queue(located.pass_index), self.trainer.id
        todo_key, pending_key = f"{prefix}todo/{located.chunk}", f"{prefix}pending/{located.chunk}"
        done_key, failed_key = f"{prefix}done/{located.chunk}", f"{prefix}failed/{located.chunk}"
        batches = int(self.plan.batches[located.chunk])
        last_step = located.chunk_start_step + batches - 1
        while True:
            read = etcd.txn([], [get_op(k) for k in (todo_key, pending_key, failed_key, done_key)])
            todo_kv, pending_kv = read.kv(0), read.kv(1)
            if (failed_kv := read.kv(2)) is not None:
                self._discarded[located.pass_index, located.chunk] = _failed(failed_kv).step
                return None
            if pending_kv is not None:  # left over from another holder (or an earlier claim): it holds no slot now
                etcd.txn([mod_is(pending_key, pending_kv.mod_revision)], [delete_op(pending_key)])
                continue
            todo = _todo(todo_kv)
            started = Pending(me, slot, located.chunk_start_step, todo.attempt + 1)
            ops = [put_op(todo_key, msgspec.json.encode(msgspec.structs.replace(todo, attempt=todo.attempt + 1))),
                   put_op(pending_key, msgspec.json.encode(started), self.trainer.lease)]
            if read.kv(3) is not None:  # done in a generation that was rolled back
                ops.append(delete_op(done_key))
            slot_key = self.keys.slot(slot)
            compare = [mod_is(todo_key, todo_kv.mod_revision if todo_kv else 0), absent(pending_key),
                       value_is(slot_key, me.encode())]
            result = etcd.txn(compare, ops, token=pending_key)
            if result.ok:
                return Claim(slot, last_step, located.pass_index, located.chunk, result.revision, time.monotonic())
            holder = etcd.get(slot_key)
            if holder is None or holder.value.decode() != me:
                raise WorkChanged

    def _complete(self, claim: Claim) -> None:
        prefix = self.keys.queue(claim.pass_index)
        pending_key, done_key = f"{prefix}pending/{claim.chunk}", f"{prefix}done/{claim.chunk}"
        ops = [delete_op(f"{prefix}todo/{claim.chunk}"), delete_op(pending_key),
               put_op(done_key, str(claim.revision).encode())]
        if not self.trainer.etcd.txn([create_is(pending_key, claim.revision)], ops, token=done_key).ok:
            log.info("chunk %d is not ours to complete any more", claim.chunk)

    def _touch(self, claim: Claim) -> None:
        key = f"{self.keys.queue(claim.pass_index)}pending/{claim.chunk}"
        kv = self.trainer.etcd.get(key)
        if kv is not None and kv.create_revision == claim.revision:
            self.trainer.etcd.txn([create_is(key, claim.revision)], [put_op(key, kv.value, kv.lease)])

    def _take_away(self, kv: KV, timeout: float) -> None:
        """Frees an overdue chunk and its slot: the holder lives, but makes no progress."""
        pending = msgspec.json.decode(kv.value, type=Pending)
        if pending.trainer == self.trainer.id:
            return
        slot_key = self.keys.slot(pending.slot)
        if self.trainer.etcd.txn([mod_is(kv.key, kv.mod_revision), value_is(slot_key, pending.trainer.encode())],
                                 [delete_op(kv.key), delete_op(slot_key)]).ok:
            self.trainer.events.emit("overdue", f"slot {pending.slot} was taken from trainer {pending.trainer}: no "
                                                f"progress for {timeout:.0f} s", slot=pending.slot)

    def _enqueue(self, index: int) -> None:
        etcd, key = self.trainer.etcd, self.keys.pass_
        lock = f"{self.keys.queues}enqueuer"
        while True:
            kv = etcd.get(key)
            current = msgspec.json.decode(kv.value, type=PassRecord) if kv is not None else None
            if current is not None and current.pass_index == index:
                return
            mine = put_op(lock, self.trainer.id.encode(), self.trainer.lease)
            if not etcd.txn([absent(lock)], [mine], token=lock).ok:
                self.trainer.watcher.wait(functools.partial(_has_other, key, kv), 0.2)
                self.trainer.check_lease()
                continue
            try:
                self._make_records(index, kv)
            finally:
                etcd.txn([value_is(lock, self.trainer.id.encode())], [delete_op(lock)])

    def _close(self, index: int) -> None:
        """A pass is over: what its plan has is applied, so records that a dead trainer left are completed for it."""
        prefix = self.keys.queue(index)
        for kv in self.trainer.etcd.range(f"{prefix}todo/", keys_only=True).kvs:
            chunk = kv.key.rsplit("/", 1)[1]
            self.trainer.etcd.txn([mod_is(kv.key, kv.mod_revision)],
                                  [delete_op(kv.key), delete_op(f"{prefix}pending/{chunk}"),
                                   put_op(f"{prefix}done/{chunk}", b"0")])

    def _make_records(self, index: int, marker: KV | None) -> None:
        """Writes what is missing of the pass. Every write compares the marker: whoever is late changes nothing."""
        etcd, prefix, key = self.trainer.etcd, self.keys.queue(index), self.keys.pass_
        if index > 0 and self.trainer.comm.lowest() >= self.plan.start_steps[index]:
            self._close(index - 1)
        same = mod_is(key, marker.mod_revision if marker is not None else 0)
        there = {int(kv.key.rsplit("/", 1)[1]) for kv in etcd.range(prefix, keys_only=True).kvs}
        chunks = [c for c in range(len(self.plan.records)) if self.plan.batches[c]]
        todo = [c for c in chunks if c not in there]
        empty = msgspec.json.encode(Todo())
        poison = self._poison_before(index)
        for start in range(0, len(todo), PER_TRANSACTION):
            ops = [put_op(f"{prefix}failed/{c}", poison[c]) if c in poison else put_op(f"{prefix}todo/{c}", empty)
                   for c in todo[start : start + PER_TRANSACTION]]
            if not etcd.txn([same], ops).ok:
                return
        record = PassRecord(index, len(chunks), self.plan.start_steps[index])
        if etcd.txn([same], [put_op(key, msgspec.json.encode(record))]).ok and index >= 2:
            etcd.delete_prefix(self.keys.queue(index - 2))


    def _poison_before(self, index: int) -> dict[int, bytes]:
        """Chunks that failed in the pass before: they are left out of this one from its first step on."""
        step = self.plan.start_steps[index]
        kvs = self.trainer.etcd.range(f"{self.keys.queue(index - 1)}failed/").kvs if index > 0 else ()
        return {int(kv.key.rsplit("/", 1)[1]): msgspec.json.encode(msgspec.structs.replace(_failed(kv), step=step))
                for kv in kvs}


def _has_other(key: str, before: KV | None, kvs: Mapping[str, KV]) -> bool:
    return kvs.get(key) not in (None, before)


def _failed(kv: KV) -> Failed:
    return msgspec.json.decode(kv.value, type=Failed)


def _todo(kv: KV | None) -> Todo:
    return msgspec.json.decode(kv.value, type=Todo) if kv is not None else Todo()
