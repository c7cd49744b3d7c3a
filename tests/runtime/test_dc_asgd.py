"""Delay-compensated training by real pservers: the bits are those of the formulas, batch by batch."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphft
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import guest_login, put_job
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.protocol.messages import BatchAck, BatchPush, Hello, Parameters, Pull, Welcome
from graphft.runtime.roles.pserver.pserver import Pserver
from graphft.runtime.transport.buffers import as_tensor, byte_view
from graphft.runtime.transport.zeromq import ZmqClient
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear, linear_job

PUSHES = "abbaaabcbbcabbbc"
"""The order of pushes. Each computes from the parameters that came with the answer to its own last push."""
LR = 0.05


class Trainer:
    """Pushes gradients that the test makes up to one shard, of one bucket; it keeps what the shard sends."""

    def __init__(self, name: str, shard: Pserver, stack: ExitStack) -> None:
        login = stack.enter_context(guest_login(shard.member.etcd, shard.member.keys))
        self.job, self.client = shard.job, ZmqClient(name, login=login)
        stack.callback(self.client.close)
        self.client.connect(0, shard.member.registration().keyed_address)
        self.client.send(0, Hello(self.job.run_id, name))
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
        """Pushes the batch of this number in the data, two in a chunk."""
        message = BatchPush(0, batch // 8, batch % 8 // 2, batch % 2, 2, 0, 4, self.version)
        self.client.send(0, message, byte_view(gradient))
        assert self._get(BatchAck).message.fresh
        self.version, self.values = self._bucket()


def trained(values: Tensor, gradients: list[Tensor], strength: float, decay: float) -> Tensor:
    """One shard's values, trained by DC-ASGD (DC-ASGD-a, with `decay`) as its paper has it."""
    seen, mean_square = dict.fromkeys("abc", values), torch.zeros_like(values)
    for name, g in zip(PUSHES, gradients, strict=True):
        mean_square = decay * mean_square + (1 - decay) * g.square()
        rate = strength / (mean_square + 1e-7).sqrt() if decay else strength
        values = values - LR * (g + rate * g * g * (values - seen[name]))
        seen[name] = values
    return values


@pytest.mark.parametrize("decay", [0.0, 0.95])
def test_two_shards_compensate_with_what_each_trainer_had(
    etcd_server: EmbeddedEtcd, keys: Keys, tmp_path: Path, decay: float
) -> None:
    options = {"pservers": 2, "trainers": 3, "ft": False, "sync": False, "mode": "dc_asgd", "epochs": 2}
    program = linear(optimizer=graphft.SGD(lr=LR))
    job = linear_job(program=program, name=keys.job, dc_lambda=0.5, dc_decay=decay, **options)
    job.save(tmp_path)
    with Patient(etcd_server.endpoints) as etcd:
        put_job(etcd, keys, job)
    shards = [Pserver(job, tmp_path, Patient(etcd_server.endpoints), i) for i in range(2)]
    threads = [threading.Thread(target=shard.run, daemon=True) for shard in shards]
    for thread in threads:
        thread.start()
    torch.manual_seed(3)
    given: list[list[Tensor]] = []
    with ExitStack() as stack:
        for shard in shards:
            trainers = {name: Trainer(name, shard, stack) for name in "abc"}
            given.append([torch.randn_like(trainers["a"].values) for _ in PUSHES])
            for batch, (name, gradient) in enumerate(zip(PUSHES, given[-1], strict=True)):
                trainers[name].push(batch, gradient)
        for thread in threads:
            thread.join(120)
    for shard, gradients in zip(shards, given, strict=True):
        bucket = shard.server.buffers.buckets[0]
        first = torch.cat([shard.program.values[name].reshape(-1) for name in bucket.names])
        wanted, plain = (trained(first, gradients, strength, decay) for strength in (0.5, 0.0))
        torch.testing.assert_close(bucket.flat, wanted, rtol=1e-5, atol=1e-6)
        assert (wanted - plain).abs().max() > 1e-3
        assert shard.server.counters["uncompensated"] == 0
        assert shard.server.machine.staleness.max == 7, "c, at first"
