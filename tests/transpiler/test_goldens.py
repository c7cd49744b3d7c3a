"""Whole programs: what each pass makes of them, and what every role of a job runs."""

from __future__ import annotations

import pytest
import torch

import graphft
from graphft.ir import Program
from graphft.ir.parser import parse
from graphft.transpiler.job import Job
from tests.support.golden import assert_golden, difference
from tests.support.programs_by_hand import linear
from tests.support.zoo import CASES

SMALL = {"ft": False, "slice_unit": 64, "min_block": 64, "bucket_bytes": 1024}


def regression(**options: object) -> Job:
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 200), y=torch.zeros(32, 1))
    return graphft.transpile(linear(), data=data, batch_size=4, **{**SMALL, **options})


def mlp(scaler: graphft.GradScaler | None = None, **options: object) -> Job:
    """Adam, a schedule, clipping by global norm."""
    program, adam = _captured("mlp"), graphft.Adam(lr=graphft.schedule.cosine(0.01, 100))
    graphft.minimize(program, adam, graphft.ClipByGlobalNorm(1.0), grad_scaler=scaler)
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 8), y=torch.zeros(32, 4))
    return graphft.transpile(program, data=data, batch_size=4, **{**SMALL, **options})


def convnet(**options: object) -> Job:
    """Batch norm and dropout: buffers, and random numbers."""
    program = _captured("convnet")
    graphft.minimize(program, graphft.SGD(lr=0.1), graphft.ClipByValue(1.0))
    data = graphft.arrays(chunk_size=8, x=torch.zeros(32, 1, 8, 8), y=torch.zeros(32, dtype=torch.int64))
    return graphft.transpile(program, data=data, batch_size=4, **{**SMALL, **options})


def _captured(name: str) -> Program:
    torch.manual_seed(0)
    case = CASES[name]()
    return graphft.build(case.model, case.loss_fn, case.inputs, name=name)


def after(job: Job, number: int) -> str:
    """Returns what pass `number` changed in the programs that the one before it left."""
    before, stage = job.passes[number - 1], job.passes[number]
    return difference(str(before.programs), str(stage.programs), context=1)


@pytest.mark.parametrize("number", range(1, 9))
def test_each_pass(number: int) -> None:
    job = regression(trainers=2, pservers=2, ft=True)
    assert_golden(after(job, number), f"pass_{number}_{job.passes[number].after.replace('-', '_')}")


@pytest.mark.parametrize(
    ("mode", "name"), [("dc_asgd", "compensate-delay"), ("geo_sgd", "keep-optimizer"), ("geo_sgd", "local-steps")]
)
def test_each_pass_of_a_mode(mode: str, name: str) -> None:
    job = regression(trainers=2, pservers=2, sync=False, mode=mode, local_steps=2 if mode == "geo_sgd" else 1)
    (number,) = (n for n, stage in enumerate(job.passes) if stage.after == name)
    assert_golden(after(job, number), f"pass_{name.replace('-', '_')}")


TWO = {"trainers": 2, "pservers": 2, "ft": True}
JOBS = {
    "linear_s1": lambda: regression(),
    "linear_s3_ft": lambda: regression(trainers=4, pservers=3, ft=True, on_trainer_loss="wait", checkpoint_every=7),
    "mlp_s2_ft": lambda: mlp(**TWO),
    "convnet_s2_ft": lambda: convnet(**TWO, on_barrier_timeout="proceed"),
}

# A variant of a job, by what its programs have that those of the other have not.
VARIANTS = {
    "mlp_s2_skip_ft": ("mlp_s2_ft", lambda: mlp(**TWO, on_nonfinite="skip")),
    "mlp_s2_scaler_ft": ("mlp_s2_skip_ft", lambda: mlp(graphft.GradScaler(), **TWO, on_nonfinite="skip")),
    "mlp_s2_on_demand_ft": ("mlp_s2_ft", lambda: mlp(**TWO, epochs=2, passes_on_demand=True)),
    "mlp_s2_coordinator_ft": ("mlp_s2_ft", lambda: mlp(**TWO, dispatch="coordinator")),
    "mlp_s2_async_ft": ("mlp_s2_ft", lambda: mlp(**TWO, sync=False, max_staleness=4)),
    "mlp_s2_dc_asgd_ft": (
        "mlp_s2_async_ft",
        lambda: mlp(**TWO, sync=False, max_staleness=4, mode="dc_asgd", dc_lambda=2.0, dc_decay=0.95),
    ),
    "mlp_s2_half_async_ft": (
        "mlp_s2_async_ft",
        lambda: mlp(**TWO, sync=False, max_staleness=4, mode="half_async", local_steps=2),
    ),
    "mlp_s2_geo_sgd_ft": (
        "mlp_s2_half_async_ft",
        lambda: mlp(**TWO, sync=False, max_staleness=4, mode="geo_sgd", local_steps=2),
    ),
    "convnet_s2_half_async_ft": ("convnet_s2_ft", lambda: convnet(**TWO, sync=False, mode="half_async", local_steps=2)),
}


def job(name: str) -> Job:
    return JOBS[name]() if name in JOBS else VARIANTS[name][1]()


@pytest.mark.parametrize("name", JOBS)
def test_job(name: str) -> None:
    programs = job(name).programs
    assert_golden(str(programs), f"job_{name}")
    assert all(parse(str(p)) == p for p in programs.by_name().values())


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    programs, other = job(name).programs, job(VARIANTS[name][0]).programs
    assert_golden(difference(str(other), str(programs)), f"variant_{name}")
    assert all(parse(str(p)) == p for p in programs.by_name().values())


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_what_fault_tolerance_changes(sync: bool) -> None:
    job = regression(trainers=2, pservers=2, sync=sync)
    assert_golden(job.diff(), f"ft_diff_{'sync' if sync else 'async'}")
