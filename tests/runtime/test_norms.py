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
from graphft.transpiler.layout import ALL_NORMS
from tests.support.programs_by_hand import linear, linear_job

LOGIN = Login()


@pytest.fixture(scope="module")
def clipped() -> Job:
    return linear_job(program=linear(40_000, clip=ClipByGlobalNorm(1.0)), features=40_000, pservers=2, ft=False)


def exchange_of(job: Job, shard: int) -> PartialSumsExchange:
    limits = pserver_limits(job.programs.pservers, shard, 2)
    return PartialSumsExchange(f"shard-{shard}", shard, job.pserver_program(shard).blocks.get("reduce"), limits, LOGIN)


def test_every_shard_lays_the_sums_out_in_the_same_order(clipped: Job) -> None:
    exchanges = [exchange_of(clipped, shard) for shard in range(2)]
    order = exchanges[0].order
    sums = [torch.arange(sum(n for s, _, n in order if s == shard)) + 100.0 * shard + 1 for shard in range(2)]
    frames = [byte_view(s.double()) for s in sums]
    for exchange in exchanges:
        scope: dict[str, torch.Tensor] = {}
        exchange.fill(scope, frames)
        assert scope[ALL_NORMS].tolist() == [v for s, at, n in order for v in sums[s][at : at + n].tolist()]
        exchange.fill(scope, [frames[0], None])
        assert scope[ALL_NORMS].sum() == sums[0].sum(), "who has closed the step without data adds nothing"
        exchange.close()


def test_partial_sums_of_the_wrong_size_are_told_before_they_are_used(clipped: Job) -> None:
    exchange = exchange_of(clipped, 0)
    mine = sum(count for shard, _, count in exchange.order if shard == 1)
    assert exchange.fault(1, byte_view(torch.zeros(mine, dtype=torch.float64))) == ""
    assert exchange.fault(1, None) == "", "a shard without a contribution sends no frame"
    assert exchange.fault(1, byte_view(torch.zeros(mine + 1, dtype=torch.float64)))
    assert exchange.fault(7, memoryview(bytes(3))), "a shard that has none"
    exchange.close()
