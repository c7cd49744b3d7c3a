"""Delay-compensated training by real pservers: the bits are those of the formulas, batch by batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import graphft
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.protocol.messages import BatchAck, BatchPush, Hello, Parameters, Pull, Welcome
from graphft.runtime.roles.pserver.pserver import Pserver
from graphft.runtime.transport.buffers import as_tensor, byte_view
from graphft.runtime.transport.zeromq import ZmqClient
from graphft.transpiler.job import Job
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear

PUSHES = "abbaaabcbbcabbbc"
"""Who pushes next. Each computes from the parameters that came with the answer to its own last push."""
LR = 0.05


class Trainer:
    """Pushes gradients that the test makes up to one shard, of one bucket; it keeps what the shard sends."""

    def __init__(self, name: str, shard: Pserver) -> None:
        self.job, self.client = shard.job, ZmqClient(name, login=shard.member.login)
        self.client.connect(0, shard.member.address)
        self.client.send(0, Hello(self.job.run_id, shard.member.secret, name))
        self._get(Welcome)
        self.client.send(0, Pull(0, -1, 0))
        self.version, self.values = self._bucket()

    def _get(self, kind: type) -> Any:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            reply = self.client.receive(0.1)
            if reply is not None:
                assert isinstance(reply.message, kind), reply.message
                return reply
        raise AssertionError(f"no {kind.__name__} came")

    def _bucket(self) -> tuple[int, Tensor]:
        reply = self._get(Parameters)
        return reply.message.version, as_tensor(reply.frame, torch.float32).clone()

    def push(self, batch: int, gradient: Tensor) -> None:
        """Of the batch of this number in the data, two in a chunk."""
        message = BatchPush(0, batch // 8, batch % 8 // 2, batch % 2, 2, 0, 4, self.version)
        self.client.send(0, message, byte_view(gradient))
        assert self._get(BatchAck).message.fresh
        self.version, self.values = self._bucket()


class Shards:
    """The job's pservers, each on a thread."""

    def __init__(self, server: EmbeddedEtcd, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        job.save(folder)
        with Patient(server.endpoints) as etcd:
            put_job(etcd, Keys(job.config.name), job)
        self.roles = [Pserver(job, folder, Patient(server.endpoints), i) for i in range(job.config.pservers)]
        self.threads = [threading.Thread(target=role.run, daemon=True) for role in self.roles]
        for thread in self.threads:
            thread.start()

    def trained(self) -> dict[str, Tensor]:
        for thread in self.threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self.threads)
        return load_file(self.folder / "model.safetensors")


@pytest.fixture
def run(etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path) -> Iterator[Callable[..., tuple[Shards, Any]]]:
    """Trains by the pushes above; returns the pservers, and each shard's gradients in the order of the pushes."""
    clients: list[ZmqClient] = []

    def train(**options: Any) -> tuple[Shards, list[list[Tensor]]]:
        data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
        job = graphft.transpile(
            linear(optimizer=graphft.SGD(lr=LR)),
            data=data,
            batch_size=4,
            trainers=3,
            sync=False,
            mode="dc_asgd",
            epochs=2,
            slice_unit=64,
            min_block=64,
            name=keys.job,
            **options,
        )
        shards = Shards(etcd_server, job, tmp_path / "job")
        torch.manual_seed(3)
        gradients: list[list[Tensor]] = []
        for role in shards.roles:
            trainers = {name: Trainer(name, role) for name in "abc"}
            clients.extend(t.client for t in trainers.values())
            gradients.append([torch.randn_like(trainers["a"].values) for _ in PUSHES])
            for batch, (name, gradient) in enumerate(zip(PUSHES, gradients[-1], strict=True)):
                trainers[name].push(batch, gradient)
        return shards, gradients

    yield train
    for client in clients:
        client.close()


def reference(
    values: list[Tensor], gradients: list[list[Tensor]], *, strength: float, decay: float = 0.0
) -> list[Tensor]:
    """One shard's slices, trained by DC-ASGD (DC-ASGD-a, with `decay`) as its paper has it."""
    params = [v.clone() for v in values]
    seen = {name: [v.clone() for v in values] for name in "abc"}
    mean_square = [torch.zeros_like(v) for v in values]
    for name, given in zip(PUSHES, gradients, strict=True):
        for i, (w, backup, g) in enumerate(zip(params, seen[name], given, strict=True)):
            mean_square[i] = decay * mean_square[i] + (1 - decay) * g.square()
            rate = strength / (mean_square[i] + 1e-7).sqrt() if decay else torch.tensor(strength)
            w.grad = g + rate * g * g * (w - backup)
        for w in params:
            assert w.grad is not None
            w -= LR * w.grad
        seen[name] = [w.clone() for w in params]
    return params


def check(shards: Shards, gradients: list[list[Tensor]], **options: float) -> None:
    """Each slice as trained by the formulas; and not as it would be without compensation."""
    trained = shards.trained()
    flat = {f"{n}@slice{i}": part for n in ("w", "b") for i, part in enumerate(trained[n].reshape(-1).split(128))}
    flat |= {n: v.reshape(-1) for n, v in trained.items()}
    for role, given in zip(shards.roles, gradients, strict=True):
        names = role.server.buffers.buckets[0].names
        values = [role.program.values[n] for n in names]
        split = [list(g.split([v.numel() for v in values])) for g in given]
        wanted = reference(values, split, **options)
        plain = reference(values, split, **{**options, "strength": 0.0})
        for name, value in zip(names, wanted, strict=True):
            torch.testing.assert_close(flat[name], value, rtol=1e-5, atol=1e-6)
        assert (torch.cat(wanted) - torch.cat(plain)).abs().max() > 1e-3
        assert role.server.counters["uncompensated"] == 0
        assert role.server.machine.staleness.max == 7, "c, at first"


@pytest.mark.parametrize("decay", [0.0, 0.95])
def test_two_shards_compensate_with_what_each_trainer_had(run: Callable[..., Any], decay: float) -> None:
    shards, gradients = run(pservers=2, dc_lambda=0.5, dc_decay=decay)
    check(shards, gradients, strength=0.5, decay=decay)
