"""Whole jobs in one process: nothing of a role is global, so that any number of them can be tested side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import graphft
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.roles.coordinator.coordinator import Coordinator
from graphft.runtime.roles.pserver.pserver import Pserver
from graphft.runtime.roles.trainer.chunk_trainer import ChunkTrainer
from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer
from graphft.transpiler.job import Job
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear


class Roles:
    """The roles of a job, each on a thread, with an etcd client of its own."""

    def __init__(self, server: EmbeddedEtcd, job: Job, folder: Path) -> None:
        self.server, self.job, self.folder = server, job, folder
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        job.save(folder)  # with long leases: a role that loses its lease ends the process
        with Patient(server.endpoints) as etcd:
            put_job(etcd, Keys(job.config.name), job)
        pserver, trainer = (Pserver, SlotTrainer) if job.config.sync else (Pserver, ChunkTrainer)
        for index in range(2):
            self._start(pserver, index)
            self._start(trainer, index)
        self._start(lambda job, folder, *rest: Coordinator(job, folder, job.coordinator_program(), *rest), 0)

    def _start(self, make: Callable[..., Any], index: int) -> None:
        role = make(self.job, self.folder, Patient(self.server.endpoints), index)
        thread = threading.Thread(target=self._run, args=(role,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, role: Any) -> None:
        try:
            role.run()
        except BaseException as error:
            self.errors.append(error)

    def join(self) -> dict[str, torch.Tensor]:
        """The trained model, once every role has ended by itself."""
        for thread in self.threads:
            thread.join(120)
        assert not self.errors
        assert not any(thread.is_alive() for thread in self.threads)
        return load_file(self.folder / "model.safetensors")


@pytest.fixture(scope="module")
def async_job() -> Job:
    data = graphft.arrays(chunk_size=8, x=torch.arange(6400.0).reshape(32, 200) / 6400, y=torch.zeros(32, 1))
    return graphft.transpile(
        linear(), data=data, batch_size=4, trainers=2, pservers=2, ft=True, sync=False, slice_unit=64, min_block=64
    )


def test_two_jobs_with_all_their_roles(
    job: Job, async_job: Job, etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path
) -> None:
    wanted = {keys.job: job, f"{keys.job}-again": job, f"{keys.job}-async": async_job}
    running = [
        Roles(etcd_server, Job(j.source, j.config.replace(name=name, lease_ttl=60), j.programs), tmp_path / name)
        for name, j in wanted.items()
    ]
    one, again, other = (roles.join() for roles in running)
    assert one.keys() == other.keys() == {"w", "b"}
    assert all(torch.equal(one[n], again[n]) for n in one)
    for model in (one, other):
        assert not torch.equal(model["w"], job.source.values["w"])
