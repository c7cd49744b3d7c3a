"""The transaction that counts a failure of a batch: reported by its trainer, or by the launcher of a dead one."""

from __future__ import annotations

import msgspec

from graphft.runtime.coordination.generation import go_back
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import get_op
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
        poison = change.outcome == "failed" and terms.slot >= 0
        back = [go_back(keys, read.kv(2), read.kv(3), change.reason)] if poison else []
        if commit(store, [change, *back]).ok:
            return change
