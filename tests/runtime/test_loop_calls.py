"""The calls of a loop of a user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import graphft
from graphft.errors import UsageError
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.protocol.chunk_queue import Discard, Discards
from graphft.runtime.queue import task_client
from tests.runtime.coordinators import Scene, scene_of
from tests.support.programs_by_hand import linear_job
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def scene(etcd_server: EmbeddedEtcd, keys: Keys) -> Iterator[Scene]:
    """Four tasks of four batches, two passes."""
    data = graphft.arrays(chunk_size=4, x=torch.zeros(16, 1).expand(-1, 200), y=torch.arange(16.0)[:, None])
    options = {"dispatch": "coordinator", "epochs": 2, "sync": False, "max_discarded": 1.0}
    with scene_of(etcd_server, keys, linear_job(data=data, batch_size=1, trainers=1, **options)) as scene:
        yield scene


def discarded(scene: Scene, chunk: int) -> tuple[Discard, ...]:
    return msgspec.json.decode(scene.value(scene.keys.discarded(chunk)), type=Discards).discards


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as found:
        call()
    assert found.value.rule == "task-loop"


def test_a_tasks_batches_are_those_of_its_pass_without_what_is_discarded(scene: Scene, tmp_path: Path) -> None:
    scene.coordinator().start(max_failures=1, max_discarded=8)
    scene.job.save(tmp_path / "job")
    plan = scene.job.config.plan
    with graphft.TaskLoop(tmp_path / "job", scene.server.endpoints[0]) as tasks:
        found = tasks.get()
        assert found
        (task,) = found
        read = [batch["y"].flatten().tolist() for batch in tasks.batches(task)]
        order = [plan.positions(0, task.chunk, n).tolist() for n in range(4)]
        assert read == [[4.0 * task.chunk + p for p in positions] for positions in order]
        tasks.fail(task, "broken", batch=2)
        while not (again := [t for t in tasks.get() or [] if t.chunk == task.chunk]):
            pass
        assert again[0].without == set(order[2])
        assert [batch["y"].flatten().tolist() for batch in tasks.batches(again[0])] == read[:2] + read[3:]
    without = graphft.TaskLoop(scene.job, scene.server.endpoints[0])
    refused(lambda: next(without.batches(task)))
    without.close()


# -- tasks that fail -------------------------------------------------------------------------------------------------


def test_a_task_that_always_fails_is_discarded_as_a_whole(scene: Scene) -> None:
    scene.coordinator().start(max_failures=3, max_discarded=8)
    failures: Counter[int] = Counter()
    done: list[int] = []
    with graphft.TaskLoop(scene.job, scene.server.endpoints[0]) as tasks:
        while (found := tasks.get()) is not None:
            for task in found:
                assert not task.without
                if task.chunk == 1:
                    failures[task.pass_index] += 1
                    tasks.fail(task, "chunk 1 is broken")
                else:
                    done.append(task.chunk)
                    tasks.finish([task])
    assert failures == {0: 3}
    assert sorted(done) == [0, 0, 2, 2, 3, 3]
    (discard,) = discarded(scene, 1)
    assert (discard.rest, discard.failures, discard.reason) == (True, 3, "chunk 1 is broken")


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_job_is_complete_when_the_last_loop_that_saw_its_end_has_left(scene: Scene) -> None:
    one = scene.coordinator().start()
    where = scene.job, scene.server.endpoints[0]
    with graphft.TaskLoop(*where) as first, graphft.TaskLoop(*where) as second:
        while (found := first.get()) is not None:
            first.finish(found)
        first.__exit__(None, None, None)
        assert second.get() is None
        assert second.request_save_model(5), "there is a coordinator as long as a loop is there"
        assert scene.value(scene.keys.state) == b"running"
    assert one.await_end() is None
    assert scene.value(scene.keys.state) == b"complete"
    with graphft.TaskLoop(*where) as late:
        assert late.get() is None
        assert not late.request_save_model(5)


@pytest.mark.parametrize("taken_over", [False, True])
def test_who_dies_while_it_saves_the_model_is_waited_for(scene: Scene, taken_over: bool) -> None:
    one = scene.coordinator().start()
    where = scene.job, scene.server.endpoints[0]
    with graphft.TaskLoop(*where) as first:
        dies = graphft.TaskLoop(*where)
        while (found := first.get()) is not None:
            first.finish(found)
        assert dies.get() is None
        assert dies.request_save_model(600)
        scene.etcd.lease_revoke(dies.member.lease)
        until(lambda: one.server.queue.unsaved)
    until(lambda: one.server.queue.complete)
    if taken_over:
        one.die()
        one.await_end()
        one = scene.coordinator(1).start()
    until(lambda: one.serves and not one.member.view.trainers)
    assert scene.value(scene.keys.state) == b"running"
    until(lambda: any(e.kind == "unsaved-model" for _, e in read_events(scene.etcd, scene.keys)))
    with graphft.TaskLoop(*where) as again:
        assert again.get() is None
        assert again.request_save_model(5)
    assert one.await_end() is None
    assert scene.value(scene.keys.state) == b"complete"


def test_a_loop_leaves_though_no_coordinator_is_there(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_client, "LEAVE_SECONDS", 0.2)
    one = scene.coordinator().start()
    tasks = graphft.TaskLoop(scene.job, scene.server.endpoints[0])
    assert tasks.get(3)
    one.die()
    one.await_end()
    tasks.close()
