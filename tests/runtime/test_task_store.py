"""The coordinator's queues on a real etcd: what is saved is loaded again, and nothing is saved without the lock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, LeaseLost, Session, put_op
from graphft.runtime.etcd.recipes import Lock
from graphft.runtime.process.progress import Progress
from graphft.runtime.protocol.messages import FinishTasks, GetTasks, RequestSaveModel
from graphft.runtime.protocol.task_events import Answer, Asked, Living, QueueOptions
from graphft.runtime.protocol.task_groups import GROUP
from graphft.runtime.protocol.task_queue import TaskQueue
from graphft.runtime.roles.task_coordinator.task_store import GROUPS, TaskStore
from graphft.transpiler import Job
from tests.support.programs_by_hand import linear

CHUNKS = (GROUPS + 3) * GROUP


@pytest.fixture(scope="module")
def job() -> Job:
    data = graphft.arrays(chunk_size=1, x=torch.zeros(CHUNKS, 1).expand(-1, 200), y=torch.zeros(CHUNKS, 1))
    options = {"dispatch": "coordinator", "slice_unit": 64, "min_block": 64}
    return graphft.transpile(linear(), chunks=data, batch_size=1, ft=True, sync=False, passes=2, **options)


@pytest.fixture
def member(etcd_server: EmbeddedEtcd, keys: Keys, job: Job) -> Iterator[Member]:
    named = Job(job.source, job.config.replace(name=keys.job), job.programs)
    etcd = Etcd(etcd_server.endpoints)
    put_job(etcd, keys, named)
    made = Member("coordinator", 0, etcd, named, Progress())
    made.session = Session(made.etcd, 60)
    yield made
    made.close()


@pytest.fixture
def store(member: Member) -> TaskStore:
    assert member.session is not None
    lock = Lock(member.session, member.keys.coordinator_lock)
    assert lock.acquire(5)
    return TaskStore(member, lock)


def options(store: TaskStore) -> QueueOptions:
    return QueueOptions(store.plan, False, 1)


def ask(queue: TaskQueue, call: GetTasks | FinishTasks | RequestSaveModel) -> Answer:
    (answer,) = queue.step(Asked(b"peer", call, wall=1000.0), 0.0)
    assert isinstance(answer, Answer)
    return answer


def begun(store: TaskStore, groups: int = 1) -> TaskQueue:
    """Queues whose first task of so many groups is pending, the one before the last done."""
    queue, _ = store.load(options(store))
    queue.step(Living(frozenset("ab")), 0.0)
    for group in range(groups):
        tasks = queue.passes[0]
        queue._give_one(tasks, group * GROUP, GetTasks(group + 1, "a", 0), 0.0, vanished=True)
    return queue


def test_what_is_saved_is_loaded_again(store: TaskStore) -> None:
    """Pitfall 15: in more groups than one transaction takes."""
    queue = begun(store, GROUPS + 3)
    attempt = queue.passes[0].open[0].attempt
    ask(queue, FinishTasks(100, "a", 0, [(0, attempt)]))
    ask(queue, RequestSaveModel(101, "a", 60.0))
    assert store.save(queue, queue.take_changes()) == []
    again, revision = store.load(options(store))
    assert (again.counts(), again.attempts, again.saver) == (queue.counts(), queue.attempts, queue.saver)
    assert again.passes[0].open.keys() == queue.passes[0].open.keys()
    assert again.passes[0].done == queue.passes[0].done
    assert not again.check()
    assert revision > 0


def test_without_the_lock_nothing_is_saved(store: TaskStore, member: Member) -> None:
    """Pitfall 13: what a coordinator remembers that was taken for dead does not replace its successor's records."""
    queue = begun(store)
    store.save(queue, queue.take_changes())
    before = member.etcd.range(member.keys.all_tasks).kvs
    member.etcd.delete(store.lock.key)
    queue._give_one(queue.passes[0], GROUP, GetTasks(9, "b", 0), 0.0, vanished=True)
    with pytest.raises(LeaseLost):
        store.save(queue, queue.take_changes())
    with pytest.raises(LeaseLost):
        store.load(options(store))
    with pytest.raises(LeaseLost):
        store.intact()
    assert member.etcd.range(member.keys.all_tasks).kvs == before


def test_a_fence_that_does_not_hold_is_named_and_nothing_is_saved(store: TaskStore, member: Member) -> None:
    queue = begun(store)
    store.save(queue, queue.take_changes())
    before = member.etcd.range(member.keys.all_tasks).kvs
    generation = member.keys.of_shard(0).generation
    first = member.etcd.put(generation, b"{}")
    attempt = queue.passes[0].open[0].attempt
    ask(queue, FinishTasks(3, "a", 0, [(0, attempt)], [first]))
    member.etcd.put(generation, b'{"number":1}')
    bad = store.save(queue, queue.take_changes(), [("shard", 0, first), ("slot", 0, 0)])
    assert bad == [("shard", 0, first)]
    assert member.etcd.range(member.keys.all_tasks).kvs == before


def test_what_a_restored_etcd_lacks_is_saved_again(store: TaskStore, member: Member) -> None:
    """Of an etcd that was put back to a moment after the lock was gained: trainers waited for an address for ever."""
    queue = begun(store, 3)
    store.save(queue, queue.take_changes())
    store.commit([put_op(member.keys.coordinator_addr, b"here")], ())
    assert store.intact()
    for key in (member.keys.coordinator_addr, member.keys.task_state, f"{member.keys.tasks(0)}000001"):
        member.etcd.delete(key)
    assert not store.intact()
    queue.save_all()
    store.save(queue, queue.take_changes())
    store.commit([put_op(member.keys.coordinator_addr, b"here")], ())
    assert store.intact()
    again, _ = store.load(options(store))
    assert again.passes[0].open.keys() == queue.passes[0].open.keys()
    assert again.attempts == queue.attempts


def test_a_save_that_ended_between_two_transactions(store: TaskStore, member: Member, tmp_path: Path) -> None:
    """Pitfall 12: groups are there whose counts and state are not. No attempt's number is given out twice."""
    queue = begun(store, 2)
    store.save(queue, queue.take_changes())
    queue._give_one(queue.passes[0], 2 * GROUP, GetTasks(9, "b", 0), 0.0, vanished=True)
    changes = queue.take_changes()
    assert changes is not None
    groups, _ = store.ops(queue, changes)
    store.commit(groups, ())
    again, _ = store.load(options(store))
    assert 2 * GROUP in again.passes[0].open
    assert again.attempts == queue.attempts
    assert not again.check()
