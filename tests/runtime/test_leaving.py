"""A trainer that is asked to leave while it waits for others goes at once: it holds nothing to give back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from graphft.ops.context import WorkChanged
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.roles import session as session_module
from graphft.transpiler import Job
from tests.runtime.trainers import stage
from tests.support.waiting import until

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


@pytest.mark.parametrize(
    ("wait", "told"), [("pservers", "2 pservers, of which 0 are there"), ("coordinator", "a coord")]
)
def test_what_it_waits_for_is_told(
    etcd_server: EmbeddedEtcd,
    keys: Keys,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait: str,
    told: str,
) -> None:
    """A trainer that was started by hand said nothing."""
    monkeypatch.setattr(session_module, "WAIT_NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(session_module, "WAIT_AGAIN_SECONDS", 0.05)
    with stage(etcd_server, keys, job, tmp_path) as scene:
        trainer = scene.trainer(0)
        session = trainer.session

        def leave_when_told() -> None:
            until(lambda: caplog.text.count(told) > 1)
            trainer._leave()

        leaver = threading.Thread(target=leave_when_told)
        leaver.start()
        with pytest.raises(WorkChanged):
            session.wait_pservers(2, FOR_EVER) if wait == "pservers" else session.find_coordinator(FOR_EVER)
        leaver.join()
    assert f"waiting for {told}" in caplog.text
    assert "graphft start" in caplog.text


def test_while_another_begins_the_pass(etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    with stage(etcd_server, keys, job, tmp_path) as scene:
        trainer = scene.trainer(0)
        scene.etcd.put(f"{keys.queues}enqueuer", b"another trainer")
        trainer.ctx.step = 0
        with asked_soon(trainer):
            trainer.queue.begin_pass()


def test_while_its_key_is_held(etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path) -> None:
    with stage(etcd_server, keys, job, tmp_path) as scene:
        trainer = scene.trainer(0)
        held = msgspec.json.encode(Registration("another", "", 1, "a host"))
        scene.etcd.put(keys.trainer(trainer.member.id), held)
        with asked_soon(trainer):
            trainer.session.register(role="trainer", index=0, lease=True)
