"""A trainer that is asked to leave while it waits for others goes at once: it holds nothing to give back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from graphft.ops.context import WorkChanged
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.transpiler import Job
from tests.runtime.trainers import stage

FOR_EVER = 1e6
"""Seconds: the test's own time-out comes long before."""


@contextmanager
def asked_soon(trainer: Any) -> Iterator[None]:
    """What a signal's handler does, which wakes nothing; the wait inside ends by it."""
    timer = threading.Timer(0.2, trainer._leave)
    timer.start()
    with pytest.raises(WorkChanged):
        yield
    timer.join()


def test_while_pservers_are_missing(etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    with stage(etcd_server, keys, job, tmp_path) as scene:
        trainer = scene.trainer(0)
        with asked_soon(trainer):
            trainer.session.wait_pservers(2, FOR_EVER)
