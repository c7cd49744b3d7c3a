"""What a loop of a user's own may ask of the coordinator, and what it is told of the rest."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator

import pytest
import torch

import graphft
from graphft.errors import UsageError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.queue import task_client, task_loop
from graphft.transpiler import Job
from tests.runtime.coordinators import Scene, scene_of
from tests.support.programs_by_hand import linear

CHUNKS = 9000


@pytest.fixture(scope="module")
def job() -> Job:
    data = graphft.arrays(chunk_size=1, x=torch.zeros(CHUNKS, 1).expand(-1, 200), y=torch.zeros(CHUNKS, 1))
    options = {"dispatch": "coordinator", "slice_unit": 64, "min_block": 64}
    return graphft.transpile(linear(), chunks=data, batch_size=1, ft=True, sync=False, max_discarded=1.0, **options)


@pytest.fixture
def scene(job: Job, etcd_server: EmbeddedEtcd) -> Iterator[Scene]:
    with scene_of(etcd_server, Keys(f"calls-{uuid.uuid4().hex[:12]}"), job) as made:
        yield made


@pytest.fixture
def tasks(scene: Scene) -> Iterator[graphft.TaskLoop]:
    scene.coordinator().start()
    with graphft.TaskLoop(scene.job, scene.server.endpoints[0]) as loop:
        yield loop


def test_more_tasks_than_a_call_can_name_are_finished(tasks: graphft.TaskLoop) -> None:
    held: list[graphft.LoopTask] = []
    while len(held) < CHUNKS:
        held += tasks.get(1000) or []
    assert len({task.chunk for task in held}) == CHUNKS
    assert tasks.finish(held) == []
    assert tasks.get() is None


def test_no_more_is_held_than_a_renewal_can_name(tasks: graphft.TaskLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_loop, "MAX_HELD", 20)
    held = [*(tasks.get(10) or []), *(tasks.get(10) or [])]
    with pytest.raises(UsageError, match=r"get\(1\): .* 20 are held now"):
        tasks.get()
    tasks.finish(held[:1])
    assert len(tasks.get() or []) == 1


@pytest.mark.parametrize("count", [0, -3])
def test_less_than_one_task_cannot_be_asked_for(tasks: graphft.TaskLoop, count: int) -> None:
    """[] would say that others hold what is left: a loop that waits for that waits for ever."""
    with pytest.raises(UsageError, match=f"get\\({count}\\)"):
        tasks.get(count)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 1e9])
def test_the_model_is_saved_in_a_time(tasks: graphft.TaskLoop, seconds: float) -> None:
    with pytest.raises(UsageError, match="expected the seconds that saving may take"):
        tasks.request_save_model(seconds)


def test_a_reason_may_be_any_text(tasks: graphft.TaskLoop, scene: Scene) -> None:
    for reason in ("x" * 10_000_000, "\ud800", "\x00"):
        (task,) = tasks.get() or []
        tasks.fail(task, reason)
    assert len(tasks.get() or []) == 1


def test_a_loop_leaves_though_no_coordinator_is_there(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_client, "LEAVE_SECONDS", 0.2)
    one = scene.coordinator().start()
    tasks = graphft.TaskLoop(scene.job, scene.server.endpoints[0])
    assert tasks.get(3)
    one.die()
    one.await_end()
    tasks.close()
