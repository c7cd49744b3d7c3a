"""A storage that fails: checkpoints are late and not lost, nobody starts over, and what is written is on the disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graphft.errors import UsageError
from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.manifest import Manifest, Part
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.checkpoint.versioned_store import StorageUnavailable, storage
from graphft.runtime.checkpoint.writer import KEEP, PendingSnapshots, Saver, Snapshot
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.job_files import check_launcher, take_storage
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Committed, decode
from graphft.runtime.etcd import Etcd
from graphft.transpiler.job import Job
from graphft.transpiler.record import MARKER
from tests.runtime.stubs import kinds
from tests.support.waiting import until


class FailingStore(CheckpointStore):
    """A store on a storage that fails while `error` is set, with that error."""

    error = 0

    def write_part(self, *args: Any, **kwargs: Any) -> Part:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().write_part(*args, **kwargs)


def one_shard(job: Job, etcd: Etcd, keys: Keys, folder: Path, store: CheckpointStore | None = None) -> Saver:
    """The saver of a job of one shard that is in its first generation."""
    commits = Commits(etcd, keys, store or CheckpointStore(folder / "checkpoints"), 0, 1, job.hash, "p0")
    commits.ensure_generation()
    etcd.put(keys.state, b"running")
    return Saver(commits, Events(etcd, keys, "pserver 0"), job, folder, lambda: None)


def values(step: int, size: int = 4) -> Mapping[str, Tensor]:
    return {"w": torch.full((size,), float(step))}


# -- writing ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_written_is_written_later(job: Job, etcd: Etcd, keys: Keys, tmp_path: Path) -> None:
    store = FailingStore(tmp_path / "checkpoints")
    saver = one_shard(job, etcd, keys, tmp_path, store)
    store.error = errno.ENOSPC
    for step in range(1, 6):
        saver.submit(Snapshot(0, step, values(step), 9))
    until(lambda: saver.counters["checkpoint-retries"] >= 2)
    saver.check()
    store.error = 0
    until(lambda: decode(etcd.get(keys.committed), Committed) == Committed(0, 5, "step-00000005.g0"))
    until(lambda: "checkpoint-mended" in kinds(etcd, keys))
    saver.close()
    assert kinds(etcd, keys) == ["checkpoint-trouble", "checkpoint-mended"], "it says so, and not at every try"
    assert saver.counters["checkpoints-given-up"] == 5 - KEEP - (len(store.manifests()) - KEEP)


def snapshot(step: int, generation: int = 0) -> Snapshot:
    return Snapshot(generation, step, {}, 2)


def test_few_snapshots_wait_and_the_newest_always_does() -> None:
    pending = PendingSnapshots()
    given_up = [s.step for step in range(1, 101) for s in pending.add(snapshot(step))]
    left = [work.step for work in (pending.take() for _ in range(KEEP)) if isinstance(work, Snapshot)]
    assert left == [64, 100]
    assert sorted(given_up + left) == list(range(1, 101))


def test_shards_that_write_at_different_paces_keep_the_same_steps() -> None:
    """Else no checkpoint would ever have all of its parts."""

    def written(every: int, offset: int) -> set[int]:
        pending, done = PendingSnapshots(), set()
        for step in range(1, 129):
            pending.add(snapshot(step))
            if (step + offset) % every == 0:
                work = pending.take()
                assert isinstance(work, Snapshot)
                done.add(work.step)
        return done

    both = written(3, 0) & written(5, 2)
    assert len(both) >= 128 // 16
    assert max(both) > 100


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT])
def test_what_cannot_be_read_now_is_not_damaged(error: int) -> None:
    """It was taken for damaged, and the job went back to step 0."""
    with pytest.raises(StorageUnavailable, match=os.strerror(error)), storage(Path("checkpoints")):
        raise OSError(error, os.strerror(error))
    with pytest.raises(FileNotFoundError), storage(Path("checkpoints")):
        raise FileNotFoundError


def test_a_mount_that_is_away_is_waited_for(etcd: Etcd, keys: Keys, tmp_path: Path) -> None:
    """An empty folder, though etcd names a checkpoint there: nothing is decided until it is back."""
    root = tmp_path / "checkpoints"
    store = CheckpointStore(root)
    commits = Commits(etcd, keys, store, 0, 1, "program", "p0")
    commits.ensure_generation()
    for step in (50, 100):
        commits.publish(0, step, store.write_part(0, step, 0, 1, values(step)))
    before = etcd.get(keys.generation)
    root.rename(tmp_path / "away")
    root.mkdir()
    with pytest.raises(StorageUnavailable) as caught:
        commits.rollback("restarted")
    assert "mount" in caught.value.help
    root.rmdir()
    with pytest.raises(StorageUnavailable):
        commits.rollback("restarted")
    assert etcd.get(keys.generation) == before
    (tmp_path / "away").rename(root)
    assert commits.rollback("restarted").step == 100


# -- what is on the disk ------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are fsynced, in order."""
    real, paths = os.fsync, list[str]()

    def fsync(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_a_new_folder_is_in_its_parent_before_the_checkpoint_counts(tmp_path: Path, synced: list[str]) -> None:
    """A machine that stopped could lose `checkpoints/` with all that lay in it."""
    store = CheckpointStore(tmp_path / "job" / "checkpoints")
    part = store.write_part(0, 50, 0, 2, values(50))
    folders = [tmp_path, tmp_path / "job", Path(store.root), Path(store.root, "step-00000050.g0")]
    assert set(map(str, folders)) <= set(synced)
    synced.clear()
    other = CheckpointStore(store.root).write_part(0, 50, 1, 2, values(50))  # it did not make the folder: did anybody?
    assert {store.root, f"{store.root}/step-00000050.g0"} <= set(synced)
    synced.clear()
    store.write_manifest(Manifest(0, 50, "program", (part, other)))
    assert {store.root, f"{store.root}/step-00000050.g0"} <= set(synced)


def test_the_newest_launcher_has_it(tmp_path: Path) -> None:
    place = tmp_path / "storage"
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (place, one, two):
        folder.mkdir()
        (folder / MARKER).write_text(json.dumps({"url": f"file://{place}"}))
    (place / "job.json").touch()
    take_storage(one)
    check_launcher(one)
    take_storage(two)
    check_launcher(two)
    with pytest.raises(UsageError, match="pid"):
        check_launcher(one)
    take_storage(one, shared=True)
    check_launcher(one)  # an etcd that all machines share keeps them apart
    for path in place.iterdir():
        path.unlink()
    with pytest.raises(OSError, match="mounted"):
        check_launcher(two)
    check_launcher(tmp_path)  # no storage: nothing to do
