"""The shards' exchange of partial sums: laid out in one order on every shard, sent to where the shards are now."""

from __future__ import annotations

import pytest
import torch

from graphft.optim.optimizers import ClipByGlobalNorm
from graphft.runtime.roles.programs import pserver_limits
from graphft.runtime.roles.pserver.norms import PartialSumsExchange
from graphft.runtime.transport import Login
from graphft.runtime.transport.buffers import byte_view
from graphft.transpiler.job import Job
from tests.support.programs_by_hand import linear, linear_job

LOGIN = Login("a run", "its secret")


@pytest.fixture(scope="module")
def clipped() -> Job:
    return linear_job(program=linear(40_000, clip=ClipByGlobalNorm(1.0)), features=40_000, pservers=2, ft=False)


def exchange_of(job: Job, shard: int) -> PartialSumsExchange:
    limits = pserver_limits(job.programs.pservers, shard, 2)
    return PartialSumsExchange(f"shard-{shard}", shard, job.pserver_program(shard).blocks.get("reduce"), limits, LOGIN)


def test_partial_sums_of_the_wrong_size_are_told_before_they_are_used(clipped: Job) -> None:
    exchange = exchange_of(clipped, 0)
    mine = sum(count for shard, _, count in exchange.order if shard == 1)
    assert exchange.fault(1, byte_view(torch.zeros(mine, dtype=torch.float64))) == ""
    assert exchange.fault(1, None) == "", "a shard without a contribution sends no frame"
    assert exchange.fault(1, byte_view(torch.zeros(mine + 1, dtype=torch.float64)))
    assert exchange.fault(7, memoryview(bytes(3))), "a shard that has none"
    exchange.close()
