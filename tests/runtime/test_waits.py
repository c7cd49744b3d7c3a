"""A real trainer waits for storage, for etcd, for shards: for how long, and what ends the wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import graphft
from graphft.errors import GraphftError
from graphft.ops.context import WorkChanged
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.data import BatchKey
from graphft.runtime.etcd import EtcdError
from graphft.runtime.roles.trainer import batches as storage_wait
from graphft.transpiler.job import Job
from tests.runtime.stubs import kinds
from tests.runtime.trainers import Stage, Staged
from tests.support.programs_by_hand import linear
from tests.support.waiting import until


@pytest.fixture
def scene(staged: Staged, tmp_path: Path) -> Stage:
    """The job's data are two files of one chunk in `tmp_path/in`."""
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / name).write_bytes(b"a,y\n1,1\n2,2\n")
    data = graphft.files([str(tmp_path / "in" / n) for n in "ab"], "csv", {"x": ("a",) * 8, "y": ("y",)})
    return staged(graphft.transpile(linear(features=8), data=data, batch_size=2, ft=True, sync=False))


def test_an_outage_that_lasts(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_wait, "WAIT_SECONDS", 1.0)
    trainer = scene.trainer(0)
    (scene.folder / "in").rename(scene.folder / "away")
    with pytest.raises(GraphftError, match=r"storage has been away for \d+ s: reading chunk 1") as error:
        trainer.data.read(BatchKey(0, 1, 0, 2))
    assert error.value.rule == "storage-away"
    trainer._report(error.value)
    assert "step-failed" not in kinds(scene.etcd, scene.keys)


def test_a_trainer_that_is_asked_to_leave_waits_no_longer(scene: Stage) -> None:
    trainer: Any = scene.trainer(0)
    trainer.member.progress.begin("computing")
    usual = trainer.member.progress.limit
    assert usual < storage_wait.WAIT_SECONDS
    (scene.folder / "in").rename(scene.folder / "away")

    seen = []

    def leave() -> None:
        try:
            until(lambda: "waiting for storage: cannot read" in trainer.status().waiting)
            seen.append((trainer.state.alive_since(time.monotonic() - 10), trainer.member.progress.limit))
        finally:
            trainer.state.leaving = True

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(WorkChanged):
        trainer.data.read(BatchKey(0, 1, 0, 2))
    thread.join()
    assert seen == [(False, storage_wait.WAIT_SECONDS)], "no claim is renewed, and the process does not count as hung"
    assert trainer.member.progress.limit == usual
    assert trainer.status().waiting == ""
    assert not trainer.data.may_claim()


def test_a_refusal_for_good_is_not_repeated(staged: Staged, keys: Keys, job: Job) -> None:
    trainer, tries = staged(job).trainer(0), list[int]()
    key = keys.discarded(3)

    def record() -> int:
        tries.append(1)
        return int(trainer.member.etcd.put(key, bytes(2_000_000)))

    with pytest.raises(EtcdError, match=key) as caught:
        trainer.member.retry_while_leased(record)
    assert caught.value.rule == "etcd-request"
    assert len(tries) == 1
