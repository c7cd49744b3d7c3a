"""Loops of a user's own that get their tasks from coordinators that are killed."""

from __future__ import annotations

import signal
import threading
import uuid
from collections import Counter
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.coordination.job_view import read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.revoker import Revoker
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.transpiler.job import Job
from tests.integration.plays import Program
from tests.support.programs_by_hand import linear
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
CHUNKS = 600


@pytest.fixture
def keys() -> Keys:
    return Keys(f"loop-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def job(keys: Keys) -> Job:
    data = graphft.arrays(chunk_size=1, x=torch.zeros(CHUNKS, 1).expand(-1, 200), y=torch.zeros(CHUNKS, 1))
    options = {"dispatch": "coordinator", "slice_unit": 64, "min_block": 64, "lease_ttl": 60}
    return graphft.transpile(linear(), data=data, batch_size=1, ft=True, sync=False, epochs=2, name=keys.job, **options)


def test_each_task_is_done_once_though_coordinators_die(
    job: Job, etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path
) -> None:
    """A call survives the coordinator's death, and nothing is doubled."""
    job.save(tmp_path / "job")
    where = ["--job", tmp_path / "job", "--etcd", etcd_server.endpoints[0]]
    done: Counter[tuple[int, int]] = Counter()
    lost: list[object] = []
    saving: list[bool] = []
    reached, go_on = threading.Event(), threading.Event()

    def train(number: int) -> None:
        with graphft.TaskLoop(tmp_path / "job", etcd_server.endpoints[0]) as tasks:
            while (found := tasks.get(7)) is not None:
                if sum(done.values()) > CHUNKS // 2:
                    reached.set()
                    go_on.wait(150)
                    tasks.renew()
                lost.extend(tasks.finish(found))
                done.update((task.pass_index, task.chunk) for task in found)
            assert tasks.get(7) is None, "all passes stay done"
            saving.append(tasks.request_save_model(60))

    with Etcd(etcd_server.endpoints, deadline=60) as etcd:
        coordinators = [
            Program(tmp_path, "-m", "graphft", "start", "coordinator", *where, "--index", str(i)) for i in range(2)
        ]
        threads = [threading.Thread(target=train, args=(i,), daemon=True) for i in range(2)]
        for thread in threads:
            thread.start()
        assert reached.wait(150)
        before = read_view(keys, etcd.range(keys.control).kvs).coordinator
        assert before is not None
        number = int(before.id.partition("-")[0])
        victim, other = coordinators[number], coordinators[1 - number]
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        revoker = Revoker(etcd, keys)
        until(lambda: revoker.try_once(before.process, 10))
        go_on.set()
        for thread in threads:
            thread.join(150)
            assert not thread.is_alive()
        assert done == Counter({(p, c): 1 for p in range(2) for c in range(CHUNKS)})
        assert not lost
        assert sorted(saving) == [False, True]
        until(lambda: etcd.get(keys.state).value == b"complete")  # type: ignore[union-attr]
        until(lambda: other.process.poll() == 0)
        assert f"coordinator {1 - number} gives out tasks" in other.output
