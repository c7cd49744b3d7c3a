"""The coordinator's queues in a real etcd: what is saved is loaded, and nothing is saved without the lock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from graphft.errors import GraphftError
from graphft.plan import Plan
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import PassRecord, decode
from graphft.runtime.etcd import EmbeddedEtcd, LeaseLost
from graphft.runtime.etcd.fencing import Lock
from graphft.runtime.protocol.messages import FinishTasks, GetTasks, ReleaseTasks, RequestSaveModel, Tasks
from graphft.runtime.protocol.task_events import Answer, Asked, Living, QueueOptions
from graphft.runtime.protocol.task_pass import GROUP
from graphft.runtime.protocol.task_queue import TaskQueue
from graphft.runtime.roles.coordinator.task_store import GROUPS, TaskStore
from graphft.transpiler.job import Job
from tests.protocol.task_rigs import durable
from tests.runtime.coordinators import Scene, scene_of

PLAN = Plan([4, 4, 4, 4], slots=2, batch_size=2, passes=2)
WIDE = Plan([2] * (GROUP * GROUPS + GROUP), slots=1, batch_size=2, passes=2)
"""One group more than a transaction takes."""


class Holder:
    """A process that holds the lock, or waits for it."""

    def __init__(self, scene: Scene, plan: Plan) -> None:
        self.member = scene.member("coordinator")
        self.lock = Lock(self.member.session, scene.keys.coordinator_lock)
        self.store = TaskStore(self.member, self.lock)
        self.store.plan = plan
        self.options = QueueOptions(plan, False, 1)
        self.calls = 0

    def take(self) -> TaskQueue:
        self.lock.acquire()
        return self.load()

    def load(self) -> TaskQueue:
        queue, _ = self.store.load(self.options)
        queue.step(Living(frozenset("ab")), 0.0)
        return queue

    def save(self, queue: TaskQueue, *fences: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        return self.store.save(queue, queue.take_changes(), fences)

    def ask(self, queue: TaskQueue, make: Any, *fields: Any) -> Any:
        self.calls += 1
        effects = queue.step(Asked(b"", make(self.calls, "a", *fields), 50.0), 0.0)
        return next(e.message for e in effects if isinstance(e, Answer))

    def get(self, queue: TaskQueue, want: int) -> list[tuple[int, int]]:
        found = self.ask(queue, GetTasks, queue.current, want)
        assert isinstance(found, Tasks)
        return found.tasks


@pytest.fixture
def scene(etcd_server: EmbeddedEtcd, keys: Keys, coordinated: Job) -> Iterator[Scene]:
    with scene_of(etcd_server, keys, coordinated) as made:
        yield made


def records(scene: Scene) -> dict[str, bytes]:
    prefix = scene.keys.all_tasks
    found = {kv.key.removeprefix(prefix): kv.value for kv in scene.etcd.range(prefix).kvs}
    return found | {"pass": scene.value(scene.keys.pass_)}


def test_what_is_saved_is_loaded(scene: Scene) -> None:
    holder = Holder(scene, PLAN)
    queue = holder.take()
    holder.save(queue)
    assert durable(holder.load()) == durable(queue)
    a, b, c = (holder.get(queue, 1)[0] for _ in range(3))
    holder.ask(queue, FinishTasks, 0, [a])
    holder.ask(queue, ReleaseTasks, 0, [(*b, 1)])
    holder.ask(queue, RequestSaveModel, 30.0)
    assert holder.save(queue) == []
    assert durable(holder.load()) == durable(queue)
    assert queue.take_changes() is None
    other = holder.load()
    holder.ask(other, FinishTasks, 0, [c])
    for chunk in holder.get(other, 1), holder.get(other, 1):
        holder.ask(other, FinishTasks, 0, chunk)
    assert holder.save(other) == []
    marker = decode(scene.etcd.get(scene.keys.pass_), PassRecord)
    assert marker is not None
    assert (marker.pass_index, marker.chunks, marker.start_step) == (1, 4, PLAN.start_steps[1])
    assert sorted(records(scene)) == ["counts", "model_saver", "pass", "state"], "of a pass that is over, nothing"
    assert durable(holder.load()) == durable(other)


def test_a_lost_lock_saves_and_loads_nothing(scene: Scene) -> None:
    one, other = Holder(scene, PLAN), Holder(scene, PLAN)
    queue = one.take()
    one.save(queue)
    one.get(queue, 1)
    scene.etcd.delete(one.lock.key)
    successor = other.take()
    other.get(successor, 2)
    other.save(successor)
    before = records(scene)
    for act in (lambda: one.save(queue), one.load, lambda: one.store.commit([], ())):
        with pytest.raises(LeaseLost):
            act()
    assert records(scene) == before


def test_fences_that_do_not_hold_are_named_and_nothing_is_saved(scene: Scene) -> None:
    holder = Holder(scene, PLAN)
    queue = holder.take()
    holder.save(queue)
    before = records(scene)
    held = scene.etcd.put(scene.keys.of_shard(0).generation, b"{}")
    slot = scene.etcd.put(scene.keys.slot(1), b"a")
    moved = scene.etcd.put(scene.keys.of_shard(1).generation, b"{}")
    scene.etcd.put(scene.keys.slot(1), b"a")  # its creation is the fence
    good = [("shard", 0, held), ("slot", 1, slot)]
    bad = [("shard", 1, moved - 1), ("shard", 2, 5), ("slot", 0, 3), ("slot", 1, slot + 1)]
    holder.get(queue, 1)
    assert sorted(holder.save(queue, *good, *bad)) == sorted(bad)
    assert records(scene) == before
    queue = holder.load()
    holder.get(queue, 1)
    assert holder.save(queue, *good, ("shard", 1, moved)) == []
    assert records(scene) != before
    assert holder.store.save(queue, None, good) == []
    assert holder.store.save(queue, None, bad[:1]) == bad[:1], "also when there is nothing to save"


@pytest.mark.parametrize("name", ["counts", "state", "0/000000", "0/000300", "zero/000000"])
def test_a_damaged_record_ends_the_coordinator(scene: Scene, name: str) -> None:
    holder = Holder(scene, PLAN)
    queue = holder.take()
    holder.get(queue, 1)
    holder.save(queue)
    key = f"{scene.keys.all_tasks}{name}"
    value = scene.value(key) or scene.value(f"{scene.keys.all_tasks}0/000000")
    scene.etcd.put(key, value[: len(value) // 2])
    with pytest.raises(GraphftError, match=r"^error\[task-records\]"):
        holder.load()
