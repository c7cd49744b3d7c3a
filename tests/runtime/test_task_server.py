"""A coordinator's services on real etcd and real ZeroMQ: start, take-over, calls that survive it, what is discarded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd import EmbeddedEtcd, LeaseLost
from graphft.runtime.protocol.chunk_queue import Discard, Discards
from graphft.transpiler.job import Job
from tests.runtime.coordinators import CHUNKS, Scene, Trainer, async_job, scene_of, serving
from tests.support.waiting import until


@pytest.fixture(scope="module")
def job() -> Job:
    return async_job()


@pytest.fixture
def scene(etcd_server: EmbeddedEtcd, keys: Keys, job: Job) -> Iterator[Scene]:
    with scene_of(etcd_server, keys, job) as made:
        yield made


def take_all(trainer: Trainer, pass_index: int = 0) -> dict[int, int]:
    held: dict[int, int] = {}
    while found := trainer.get(10, pass_index):
        held |= found
    return held


def test_a_coordinator_takes_the_lock_then_loads_then_says_where_it_is(scene: Scene) -> None:
    one, other = scene.coordinator(0), scene.coordinator(1)
    seen: list[tuple[bool, int, bytes]] = []
    loads = one.server.load_tasks

    def look() -> None:
        seen.append((one.server.lock.revision > 0, one.server.store.loads, scene.value(scene.keys.coordinator_addr)))

    one.server.load_tasks = lambda: (look(), loads(), look())  # type: ignore[method-assign, func-returns-value]
    one.start()
    assert serving(scene, one) is one
    assert seen == [(True, 0, b""), (True, 1, b"")]
    assert (
        msgspec.json.decode(scene.value(scene.keys.coordinator_addr), type=Registration).address == one.member.address
    )
    other.start()
    until(lambda: len(scene.etcd.range(f"{scene.keys.coordinator_lock}/").kvs) == 2)
    assert (other.serves, other.server.store.loads) == (False, 0)
    assert take_all(scene.trainer()).keys() == set(range(CHUNKS))
    assert [e.text for _, e in read_events(scene.etcd, scene.keys)] == ["coordinator 0 gives out tasks"]


def test_nothing_is_answered_after_the_lock_is_lost(scene: Scene) -> None:
    one = scene.coordinator().start()
    trainer = scene.trainer()
    held = take_all(trainer)
    scene.etcd.delete(one.server.lock.key)
    until(lambda: one.server.lock.key not in one.member.watcher.snapshot())
    sent = one.transport.counters["sent"]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(trainer.get)  # has nothing to give
        assert isinstance(one.await_end(), LeaseLost)
        assert one.transport.counters["sent"] == sent
        two = scene.coordinator(1).start()
        assert asking.result(120) == {}
    assert serving(scene, two).server.queue.counts()["0"].pending == len(held)


def discarded(scene: Scene, chunk: int) -> tuple[Discard, ...]:
    value = scene.value(scene.keys.discarded(chunk))
    return msgspec.json.decode(value, type=Discards).discards if value else ()


def test_a_batch_that_fails_too_often_is_discarded_and_its_task_goes_on(scene: Scene) -> None:
    serving(scene, scene.coordinator().start(max_failures=2))
    trainer = scene.trainer()
    ((chunk, attempt), *rest) = take_all(trainer).items()
    trainer.finish(dict(rest))
    assert trainer.fail(chunk, attempt + 99, 1).outcome == "", "the task is another's by now"
    assert trainer.fail(chunk, attempt, 1).outcome == "released"
    assert trainer.fail(chunk, attempt, 1).outcome == "", "told again: counted once"
    ((_, again),) = trainer.get().items()
    told = trainer.fail(chunk, again, 1)
    assert (told.outcome, told.cause) == (
        "discarded",
        f"batch 1 of chunk {chunk} in pass 0 failed 2 times in a row without progress (it is bad)",
    )
    assert discarded(scene, chunk) == (Discard(0, 1, "it is bad", 2),)
    given = trainer.tasks()
    assert given.discarded == [(chunk, Discards((Discard(0, 1, "", 2),)))], "an answer has no room for reasons"
    assert trainer.finish(dict(given.tasks)) == []
    assert trainer.tasks(pass_index=0).pass_index == 1


def test_a_job_that_would_lose_too_much_fails(scene: Scene) -> None:
    one = scene.coordinator().start(max_failures=1, max_discarded=0)
    trainer = scene.trainer()
    ((chunk, attempt),) = trainer.get().items()
    assert trainer.fail(chunk, attempt, 0).outcome == "job-failed"
    assert scene.value(scene.keys.state) == b"failed"
    assert discarded(scene, chunk) == ()
    failure = one.await_end()
    assert failure is not None
    assert "2 of 32 records would be discarded, at most 0 may be" in failure.message
