"""The coordinator's queues in etcd: loaded when the lock is gained, and saved before anything is answered."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from graphft.errors import GraphftError
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassRecord
from graphft.runtime.etcd import KV, LeaseLost, create_is, delete_prefix_op, get_op, mod_is, put_op
from graphft.runtime.etcd.fencing import Lock
from graphft.runtime.etcd.model import Compare, Op
from graphft.runtime.protocol.task_events import Changes, QueueOptions
from graphft.runtime.protocol.task_pass import ModelSaver, QueueState, TaskCounts
from graphft.runtime.protocol.task_queue import TaskQueue

Fence = tuple[str, int, int]
GROUPS = 64
"""Groups of one transaction: etcd takes 128 operations, and 1.5 MB, which so many do not reach."""
_COUNTS = dict[str, TaskCounts]


class TaskStore:
    """Every transaction compares the lock: a process that has lost it changes nothing."""

    def __init__(self, member: Member, lock: Lock) -> None:
        self.member, self.keys, self.lock = member, member.keys, lock
        self.plan = member.config.plan
        self.loads = self.commits = self._revision = 0

    # -- loading ------------------------------------------------------------------------------------------------

    def load(self, options: QueueOptions) -> tuple[TaskQueue, int]:
        """Returns the queues as they are in etcd, or new ones; and the revision at which they were read."""
        return self.member.retry_while_leased(functools.partial(self._load, options))

    def _load(self, options: QueueOptions) -> tuple[TaskQueue, int]:
        queue = TaskQueue(options)
        read = self.member.etcd.txn([self.lock.fence()], [get_op(key) for key in self._heads], self._look_at_lock)
        if not read.ok:
            self.lost()
        counts, state, saver, marker = (read.kv(i) for i in range(len(self._heads)))
        self.loads += 1
        found = self._decoded(state, QueueState) or QueueState()
        known: dict[str, TaskCounts] | None = self._decoded(counts, _COUNTS)
        if known is None:
            queue.begin(found)
            return queue, read.revision
        recorded = self._decoded(marker, PassRecord)
        index, groups = recorded.pass_index if recorded is not None else -1, self._groups()
        try:
            queue.load(index, known, groups, found, self._decoded(saver, ModelSaver), time.monotonic())
        except (ValueError, LookupError) as error:
            raise self._damaged(self.keys.all_tasks, str(error)) from None
        return queue, read.revision

    def _decoded(self, kv: KV | None, kind: Any) -> Any:
        if kv is None:
            return None
        try:
            return msgspec.json.decode(kv.value, type=kind)
        except msgspec.DecodeError as error:
            raise self._damaged(kv.key, str(error)) from None

    def _damaged(self, key: str, what: str) -> GraphftError:
        return GraphftError(
            f"the record {key} in etcd is damaged: {what}",
            rule="task-records",
            help=f"restore etcd from a backup; or begin the queues anew: etcdctl del --prefix {self.keys.all_tasks}",
        )

    @property
    def _heads(self) -> tuple[str, ...]:
        return self.keys.task_counts, self.keys.task_state, self.keys.model_saver, self.keys.pass_

    @property
    def _look_at_lock(self) -> list[Op]:
        return [get_op(self.lock.key)]

    def _groups(self) -> dict[int, dict[int, bytes]]:
        """Nobody else writes them while the lock is held."""
        found: dict[int, dict[int, bytes]] = {}
        for kv in self.member.etcd.range(self.keys.all_tasks).kvs:
            index, _, group = kv.key.removeprefix(self.keys.all_tasks).partition("/")
            if not group:
                continue
            if not (index.isdigit() and group.isdigit()):
                raise self._damaged(kv.key, "there is no such pass and group")
            found.setdefault(int(index), {})[int(group)] = kv.value
        return found

    def check(self) -> None:
        """Raises LeaseLost when the lock is lost, or etcd was restored from a backup: it is behind this process."""
        ops = [get_op(self.keys.coordinator_addr)]
        read = self.member.retry_while_leased(
            lambda: self.member.etcd.txn([self.lock.fence()], ops, self._look_at_lock)
        )
        if not read.ok or read.kv(0) is None or read.revision < self._revision:
            self.lost()
        self._revision = read.revision

    # -- saving -------------------------------------------------------------------------------------------------

    def save(self, queue: TaskQueue, changes: Changes | None, fences: Sequence[Fence] = ()) -> list[Fence]:
        """Saves what has changed, if all fences hold. Returns those that do not: nothing is saved then (or, of very
        many groups, some: read all again). LeaseLost when the lock is lost."""
        groups, heads = self.ops(queue, changes) if changes is not None else ([], [])
        parts = [groups[i : i + GROUPS] for i in range(0, len(groups), GROUPS)] or [[]]
        if len(parts) > 1 and changes is not None:  # a successor uses no number that only the groups may have
            parts[0] = [put_op(self.keys.task_state, msgspec.json.encode(changes.state)), *parts[0]]
        parts[-1] = [*parts[-1], *heads]  # what is read first is written last: it tells of groups that are there
        for part in parts:
            bad = self.commit(part, fences)
            if bad:
                return bad
        return []

    def commit(self, ops: Sequence[Op], fences: Sequence[Fence], also: Sequence[Compare] = ()) -> list[Fence]:
        """Makes one transaction under the lock; its writes are absolute, so it may be repeated until it is answered."""
        keys = [self._key(fence) for fence in fences]
        compares = [self._compare(fence) for fence in fences]
        result = self.member.retry_while_leased(
            lambda: self.member.etcd.txn(
                [self.lock.fence(), *compares, *also], ops, [*self._look_at_lock, *map(get_op, keys)], repeats=True
            )
        )
        self.commits += 1
        if result.ok and ops:
            if result.revision <= self._revision:
                self.lost("etcd was restored from a backup")
            self._revision = result.revision
        if result.ok:
            return []
        held = result.kv(0)
        if held is None or held.create_revision != self.lock.revision:
            self.lost()
        return [f for i, f in enumerate(fences) if not _holds(f, result.kv(i + 1))] or [("also", 0, 0)]

    def ops(self, queue: TaskQueue, changes: Changes) -> tuple[list[Op], list[Op]]:
        """Returns the writes: groups of tasks; and counts, state and marker."""
        keys = self.keys
        groups = [put_op(f"{keys.tasks(p)}{g:06d}", queue.passes[p].saved(g)) for p, g in changes.groups]
        heads = [
            put_op(keys.task_counts, msgspec.json.encode(changes.counts)),
            put_op(keys.task_state, msgspec.json.encode(changes.state)),
            *(delete_prefix_op(keys.tasks(index)) for index in changes.over),
        ]
        if changes.saver is not None:
            heads.append(put_op(keys.model_saver, msgspec.json.encode(changes.saver)))
        if changes.marker is not None:
            index, start_steps = changes.marker, self.plan.start_steps
            record = PassRecord(index, queue.size if index < self.plan.passes else 0, start_steps[index])
            heads.append(put_op(keys.pass_, msgspec.json.encode(record)))
        return groups, heads

    def _key(self, fence: Fence) -> str:
        kind, number, _ = fence
        return self.keys.slot(number) if kind == "slot" else self.keys.of_shard(number).generation

    def _compare(self, fence: Fence) -> Compare:
        return (create_is if fence[0] == "slot" else mod_is)(self._key(fence), fence[2])

    def lost(self, why: str = "its lock is another's: this coordinator was taken for dead") -> NoReturn:
        raise LeaseLost(why, rule="etcd-lease", help="start the process again: it reads the queues anew")


def _holds(fence: Fence, kv: KV | None) -> bool:
    if kv is None:
        return fence[2] == 0
    return fence[2] == (kv.create_revision if fence[0] == "slot" else kv.mod_revision)
