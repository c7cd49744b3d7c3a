"""How many chunks of a pass are in which state, whoever gives them out."""

from __future__ import annotations

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd.model import Store
from graphft.runtime.protocol.task_groups import TaskCounts


def count_queue(
    store: Store, keys: Keys, dispatch: str, pass_index: int, chunks: int, deadline: float | None = None
) -> TaskCounts | None:
    """Of a pass of `chunks` chunks: as the records tell that trainers claim their chunks with, or as the coordinator
    does (`dispatch`). None: no coordinator has said anything so far. `deadline`: in seconds, for each read.

    Raises EtcdError.
    """
    if dispatch == "coordinator":
        return _as_told(store, keys, pass_index, chunks, deadline)
    prefix = keys.queue(pass_index)
    todo, pending, done = (store.count(f"{prefix}{name}/", deadline=deadline) for name in ("todo", "pending", "done"))
    return TaskCounts(max(0, todo - pending), pending, done)  # the todo record stays until its chunk is done


def _as_told(store: Store, keys: Keys, pass_index: int, chunks: int, deadline: float | None) -> TaskCounts | None:
    """By the coordinator, which drops the passes that are over: all of their chunks are done."""
    kv = store.get(keys.task_counts, deadline=deadline)
    if kv is None:
        return None
    return msgspec.json.decode(kv.value, type=dict[int, TaskCounts]).get(pass_index, TaskCounts(0, 0, chunks))
