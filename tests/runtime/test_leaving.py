"""A trainer that is asked to leave while it waits for others goes at once: it holds nothing to give back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphft.ops.context import WorkChanged
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.process.role_process import EXIT_OK
from graphft.runtime.roles.trainer import batches
from graphft.runtime.roles.trainer.batches import Loading
from graphft.transpiler.job import Job
from tests.runtime.trainers import Staged
from tests.support.waiting import until

FOR_EVER = 1e6
"""Seconds: the test's own time-out comes long before."""


@contextmanager
def asked_soon(trainer: Any) -> Iterator[None]:
    """A signal's handler comes, which wakes nothing; the wait inside ends by it."""
    timer = threading.Timer(0.2, trainer._leave)
    timer.start()
    with pytest.raises(WorkChanged):
        yield
    timer.join()


def test_while_pservers_are_missing(staged: Staged, job: Job) -> None:
    trainer = staged(job).trainer(0)
    with asked_soon(trainer):
        trainer.session.wait_pservers(2, FOR_EVER)


def test_while_it_loads_it_is_shown_and_its_lease_is_kept(
    staged: Staged, keys: Keys, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LOOK_SECONDS", 0.05)
    scene = staged(job)
    member, ended = scene.trainer(0).member, list[int]()
    end: Any = SimpleNamespace(job_dir=tmp_path, now=ended.append)
    asked = threading.Event()
    member.session._due -= 600.0
    renewed = member.session.page.renewed
    with Loading(member, end, "data", asked.is_set):
        until(lambda: [kv.lease for kv in scene.etcd.range(keys.loading("", "")[:-1]).kvs] == [member.lease])
        assert member.session.page.renewed > renewed
        asked.set()
        until(lambda: ended)
    assert ended[0] == EXIT_OK
    assert not scene.etcd.count(keys.loading("", "")[:-1])
