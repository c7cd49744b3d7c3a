"""The transaction that counts a failure of a batch: reported by its trainer, or by the launcher of a dead one."""

from __future__ import annotations

import msgspec

from graphft.runtime.coordination.generation import go_back
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import decode_pass
from graphft.runtime.etcd import KV, get_op, mod_is
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.queue.transactions import commit


def fail_batch(
    store: Store, keys: Keys, pass_index: int, chunk: int, batch: int, *, claim: int, reason: str
) -> Change | None:
    """Counts a failure of the chunk at this batch, under that claim; None: it is somebody else's by now.

    `claim`: its revision. The claim itself says how many failures are too many.

    Outcome "failed": the chunk is poison. In sync mode a new generation begins with that: a holder before may have sent
    the batch to some of the shards, so this step and what follows is done again, without it on all of them.
    """
    prefix = keys.queue(pass_index)
    read_keys = (
        chunk_queue.todo_key(prefix, chunk),
        chunk_queue.pending_key(prefix, chunk),
        keys.generation,
        keys.committed,
        keys.pass_,
    )
    while True:
        read = store.txn([], [get_op(key) for key in read_keys])
        todo, pending = read.kv(0), read.kv(1)
        if todo is None or pending is None or pending.create_revision != claim:
            return None
        terms = msgspec.json.decode(pending.value, type=chunk_queue.Pending)
        change = chunk_queue.fail(
            prefix, chunk, claim, todo, progress=batch, reason=reason, max_failures=terms.max_failures
        )
        poison = change.outcome == "failed"
        later = _later(store, keys, pass_index, chunk, read.kv(4), change) if poison else []
        back = [go_back(keys, read.kv(2), read.kv(3), change.reason)] if poison and terms.slot >= 0 else []
        marker = read.kv(4)
        same = [mod_is(keys.pass_, marker.mod_revision)] if poison and marker is not None else []
        if commit(store, [change, *later, *back], also=same).ok:
            return change


def _later(store: Store, keys: Keys, pass_index: int, chunk: int, marker: KV | None, change: Change) -> list[Change]:
    """The same for the pass that is worked on, if that is a later one: its records were made before this was known.

    Of two slots, one may begin a pass while the other is at the last step of the one before.
    """
    record = decode_pass(marker)
    if record is None or record.pass_index <= pass_index:
        return []
    prefix = keys.queue(record.pass_index)
    read = store.txn([], [get_op(key(prefix, chunk)) for key in (chunk_queue.todo_key, chunk_queue.pending_key)])
    todo, failed = read.kv(0), msgspec.json.decode(change.puts[0].value, type=chunk_queue.Failed)
    return [chunk_queue.discard_again(prefix, chunk, todo, read.kv(1), failed)] if todo is not None else []
