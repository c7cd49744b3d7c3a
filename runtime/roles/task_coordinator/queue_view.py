"""The coordinator's tasks, seen as the records of the queue in etcd: what is rare is decided by the same code.

A batch that fails, and a task whose holders keep vanishing, go through `fail_batch` and `chunk_queue.claim`, which read
and write records `todo/<chunk>` and `pending/<chunk>`. Here these are the tasks in memory. What else a transaction
compares and writes (what is left out, a new generation, the job's end) is done in etcd, in one transaction with the
tasks' group, under the coordinator's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from graphft.ops.context import ClaimTerms
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import KV
from graphft.runtime.etcd.model import Compare, Op, RangeResult, TxnResult
from graphft.runtime.protocol.chunk_queue import Pending, Todo, chunk_of
from graphft.runtime.protocol.task_groups import Task
from graphft.runtime.protocol.task_queue import TaskQueue
from graphft.runtime.roles.task_coordinator.task_store import TaskStore


class QueueView:
    """The part of a `Store` that `fail_batch` and `commit` use. `reload`: makes memory what etcd has again, and gives
    the queue."""

    def __init__(self, store: TaskStore, queue: TaskQueue, terms: ClaimTerms, reload: Callable[[], TaskQueue]) -> None:
        self.store, self.queue, self.terms, self._reload = store, queue, terms, reload
        self.keys: Keys = store.keys

    def range(self, prefix: str, *, deadline: float | None = None) -> RangeResult:
        return self.store.member.etcd.range(prefix, deadline=deadline)

    def txn(
        self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = (), *, token: str | None = None
    ) -> TxnResult:
        if all(op.kind == "get" for op in success):
            return self._read([op.key for op in success])
        if not all(self._holds(c) for c in compare if self._place(c.key)):
            return TxnResult(False, 0)
        for op in success:
            place = self._place(op.key)
            if place is not None and op.kind == "put":
                self.queue.put(*place[1:], msgspec.json.decode(op.value, type=Todo))
        changes = self.queue.take_changes()
        groups, heads = self.store.ops(self.queue, changes) if changes is not None else ([], [])
        others = [op for op in success if self._place(op.key) is None]
        written = {op.key for op in others}
        mine = [op for op in (*groups, *heads) if op.key not in written]
        if self.store.commit([*mine, *others], (), [c for c in compare if self._place(c.key) is None]):
            self.queue = self._reload()
            return TxnResult(False, 0)
        return TxnResult(True, 0)

    def _read(self, keys: Sequence[str]) -> TxnResult:
        real = [key for key in keys if self._place(key) is None]
        read = self.store.member.etcd.txn([], [Op("get", key) for key in real])
        found = {key: read.kv(i) for i, key in enumerate(real)}
        kvs = [found[key] if key in found else self._record(key) for key in keys]
        return TxnResult(True, read.revision, tuple(RangeResult((kv,) if kv else (), read.revision) for kv in kvs))

    def _place(self, key: str) -> tuple[str, int, int] | None:
        """Kind, pass and chunk of a record of the queue; None for any other key."""
        rest = key.removeprefix(self.keys.queues)
        index, _, kind = rest.partition("/")
        if rest == key or not index.isdigit():
            return None
        return kind.partition("/")[0], int(index), chunk_of(key)

    def _task(self, key: str) -> tuple[str, Task | None]:
        kind, index, chunk = self._place(key) or ("", 0, 0)
        return kind, self.queue.task(index, chunk)

    def _record(self, key: str) -> KV | None:
        """Revisions are the attempt's number: it is another one after every change of its holder."""
        kind, task = self._task(key)
        if task is None or (kind == "pending" and not task.holder):
            return None
        if kind == "todo":
            value = msgspec.json.encode(task.todo)
        else:
            terms = self.terms
            pending = Pending(task.holder, task.slot, 0, 0.0, task.attempt, terms.max_failures, terms.max_discarded)
            value = msgspec.json.encode(pending)
        return KV(key, value, task.attempt, task.attempt, 1)

    def _holds(self, compare: Compare) -> bool:
        kv = self._record(compare.key)
        return (0 if kv is None else kv.mod_revision) == compare.operand
