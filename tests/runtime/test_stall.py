"""A trainer that waits for shards which do not get on meets them again; the time that it was busy itself is no wait."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Generation
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.protocol.events import SlotGained
from graphft.runtime.roles.trainer import sync_comm
from graphft.transpiler import Job
from tests.runtime.trainers import shards_at, stage


def test_a_main_thread_that_was_away_has_not_waited(
    etcd_server: EmbeddedEtcd, keys: Keys, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long step, or another thread that holds the interpreter's lock."""
    monkeypatch.setattr(sync_comm, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(sync_comm, "LOOK_SECONDS", 0.1)
    with stage(etcd_server, keys, job, tmp_path) as scene:
        scene.etcd.put(keys.generation, msgspec.json.encode(Generation(0, 0)))
        trainer = scene.trainer(0)
        shards_at(trainer, version=3)
        trainer.comm._addresses = dict.fromkeys(range(job.config.pservers), "tcp://127.0.0.1:9")
        trainer.comm.do(SlotGained(0))
        trainer.comm.pump(0)
        for _ in range(2):
            time.sleep(0.7)
            trainer.comm.pump(0)
            assert trainer.state.counters["stalls"] == 0, "it has looked once since"
        for _ in range(8):
            time.sleep(0.1)
            trainer.comm.pump(0)
        assert trainer.state.counters["stalls"] == 1
