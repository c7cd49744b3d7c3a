"""The transaction that counts a failure of a batch: reported by its trainer, or by the launcher of a dead one."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from graphft.errors import plain_text
from graphft.plan import Plan
from graphft.runtime.coordination.generation import go_back
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Failure
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import KV, Compare, get_op, mod_is
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change, Known, Pending, Put
from graphft.runtime.protocol.discards import MAX_RECORD, ChunkDiscards, Discards, count_records
from graphft.runtime.queue.transactions import commit


def fail_batch(
    store: Store,
    keys: Keys,
    plan: Plan,
    pass_index: int,
    chunk: int,
    batch: int,
    *,
    claim: int,
    reason: str,
    records: Collection[int] = (),
    certain: bool = False,
    rest: bool = False,
) -> Change | None:
    """Counts a failure of this batch, under that claim of its chunk; None: the claim is somebody else's by now.

    `claim`: its revision. The claim itself says how many failures are too many, and how many records may be discarded.
    `records`: which of the batch's are to blame, if that is known. `certain`: the first failure is one too many.
    `rest`: the batches behind it fail with it. A batch that is discarded already cannot fail: it is all the rest then.

    Outcome "discarded": the batch is, from now on. In sync mode a new generation begins with that: a holder before may
    have sent the batch to some of the shards, so this step and what follows is done again, without it on all of them.
    """
    prefix = keys.queue(pass_index)
    read_keys = (
        chunk_queue.todo_key(prefix, chunk),
        chunk_queue.pending_key(prefix, chunk),
        keys.discarded(chunk),
        keys.generation,
        keys.committed,
        keys.pass_,
    )
    while True:
        read = store.txn([], [get_op(key) for key in read_keys])
        todo, pending, discarded, generation, committed, marker = (read.kv(i) for i in range(len(read_keys)))
        if todo is None or pending is None or pending.create_revision != claim:
            return None
        terms = msgspec.json.decode(pending.value, type=Pending)
        known = Known(keys.discarded(chunk), pass_index, discarded)
        gone = ChunkDiscards(plan, chunk, known.discarded()).batches(pass_index)
        change = chunk_queue.fail(
            prefix,
            chunk,
            claim,
            todo,
            known,
            batch=batch,
            reason=reason,
            max_failures=1 if certain else terms.max_failures,
            records=records,
            rest=rest or batch in gone,
        )
        change = or_end(store, keys, plan, known, change, terms.max_discarded)
        back, same = going_back(keys, change, generation, committed, marker) if terms.slot >= 0 else ([], [])
        if commit(store, [change, *back], also=same).ok:
            return change


def going_back(
    keys: Keys, change: Change, generation: KV | None, committed: KV | None, marker: KV | None
) -> tuple[list[Change], list[Compare]]:
    """Returns what becomes part of the transaction in sync mode, and what has to hold, if a batch is discarded."""
    if change.outcome != "discarded":
        return [], []
    same = [mod_is(keys.pass_, marker.mod_revision)] if marker is not None else []
    return [go_back(keys, generation, committed, change.reason)], same


def or_end(store: Store, keys: Keys, plan: Plan, known: Known, change: Change, limit: int) -> Change:
    """The change; or, if it discards more than `limit` records of the job's data (or more pieces of one chunk than a
    record of etcd can name), the end of the job as failed.
    `limit` -1: whatever it discards, on_bad_data is "fail".

    Nothing more is discarded then: who lets the job go on is told the same again, unless the data is better by then.
    """
    if change.outcome != "discarded":
        return change
    put = next(put for put in change.puts if put.key == known.key)
    mine = msgspec.json.decode(put.value, type=Discards)
    count = count_records(plan, read_discards(store, keys) | {chunk_queue.chunk_of(known.key): mine})
    if count <= limit and len(put.value) <= MAX_RECORD:
        return change
    if count <= limit:
        pieces = f"{len(mine.discards)} pieces of chunk {chunk_queue.chunk_of(known.key)} are discarded"
        reason = f"{pieces}, more than one record of etcd can name: {change.cause}"
        remedy = "mend the data; or make smaller chunks: chunk_size=..."
    elif limit < 0:
        reason = f'on_bad_data="fail" ends the job at the first bad batch: {change.cause}'
        remedy = 'correct what the error names; or leave it out and go on: transpile(on_bad_data="discard")'
    else:
        reason = f"{count} of {sum(plan.records)} records would be discarded, at most {limit} may be: {change.cause}"
        remedy = "mend the data; or let the job lose more: transpile(max_discarded=...)"
    failure = Failure(plain_text(reason), remedy)
    puts = (Put(keys.state, b"failed"), Put(keys.failure, msgspec.json.encode(failure)))
    return Change("job-failed", reason, change.compares, puts)
