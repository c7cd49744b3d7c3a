"""A coordinator whose etcd is restored from a backup under it: what it has saved is saved again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.transpiler import Job
from tests.runtime.coordinators import CHUNKS, Coordinator, Scene, async_job, scene_of
from tests.support.waiting import until


@pytest.fixture(scope="module")
def job() -> Job:
    return async_job()


@pytest.fixture
def scene(etcd_server: EmbeddedEtcd, keys: Keys, job: Job) -> Iterator[Scene]:
    with scene_of(etcd_server, keys, job) as made:
        yield made


def test_what_a_restored_etcd_has_lost_is_saved_again_also_when_a_call_is_fenced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fence that does not hold makes memory what etcd has: that must be what was saved last."""
    monkeypatch.setattr("graphft.runtime.roles.coordinator.task_server.CHECK_SECONDS", 0.0)
    one: Coordinator = scene.coordinator().start()
    trainer = scene.trainer()
    revision = scene.etcd.put(scene.keys.of_shard(0).generation, b'{"number": 0}')
    a = trainer.get()
    until(lambda: scene.etcd.range(scene.keys.tasks(0)).kvs)
    backup = scene.etcd.range(scene.keys.all_tasks).kvs
    b = trainer.get()
    trainer.finish(a)
    for kv in backup:
        scene.etcd.put(kv.key, kv.value)
    assert trainer.finish(b, fences=(revision - 1,)) == [*b]
    counts = one.server.queue.counts()["0"]
    assert (counts.todo, counts.pending, counts.done) == (CHUNKS - 1, 0, 1)


def test_an_etcd_that_was_restored_is_noticed_by_the_next_write(
    tmp_path: Path, keys: Keys, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While calls come, each save writes what a look at the records would have missed."""
    monkeypatch.setattr("graphft.runtime.roles.coordinator.task_server.CHECK_SECONDS", 1e9)
    data, backup = tmp_path / "etcd" / "data", tmp_path / "backup"
    with EmbeddedEtcd(tmp_path / "etcd") as server, scene_of(server, keys, job) as scene:
        one = scene.coordinator().start()
        trainer = scene.trainer()
        assert trainer.finish(trainer.get()) == []
        server.stop()
        shutil.copytree(data, backup)
        server.start()
        assert trainer.finish(trainer.get()) == []
        assert trainer.finish(trainer.get()) == []
        assert trainer.save_model(600.0)
        server.stop()
        shutil.rmtree(data)
        shutil.copytree(backup, data)
        server.start()
        held = trainer.get()
        one.die()
        one.await_end()
        two = scene.coordinator(1).start()
        until(lambda: two.serves)
        counts = two.server.queue.counts()["0"]
        assert (counts.todo, counts.pending, counts.done) == (CHUNKS - 4, 1, 3)
        assert trainer.finish(held) == []
        assert not scene.trainer(1).save_model(5.0), "who may save is known again, too"
