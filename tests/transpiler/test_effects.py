"""Every option either makes a job another one, or is refused: none is accepted and ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.transpiler.api import OPTIONS
from graphft.transpiler.config import NEEDS, NEEDS_FT
from graphft.transpiler.job import Job
from tests.support.programs_by_hand import linear

DATA = graphft.arrays(chunk_size=10, x=torch.zeros(30, 200), y=torch.zeros(30, 1))
JOBS: dict[str, dict[str, Any]] = {
    f"{mode}{'-ft' * ft}": {"ft": ft, **({"sync": False, "mode": mode} if mode != "sync" else {})}
    for mode in ("sync", "async", "dc_asgd", "half_async", "geo_sgd")
    for ft in (False, True)
}
OTHER: dict[str, Any] = {
    **dict.fromkeys(("checkpoint_every", "keep_checkpoints", "max_failures", "lease_ttl", "max_skipped"), 7),
    **dict.fromkeys(("checkpoint_seconds", "recovery_timeout", "chunk_timeout", "push_timeout"), 7.0),
    "dc_lambda": 2.0,
    "dc_decay": 0.5,
    "on_trainer_loss": "wait",
    "on_barrier_timeout": "proceed",
    "on_bad_data": "fail",
    "max_discarded": 0.5,
    "storage": "file:///shared/run",
    "dispatch": "coordinator",
    "max_staleness": 7,
    "on_nonfinite": "skip",
    "daemon_interval": 0.7,
    "epochs": 2,
    "passes_on_demand": True,
    "seed": 1,
    "drop_last": True,
    "slice_unit": 128,
    "min_block": 64,
    "bucket_bytes": 1024,
    "threads": 2,
    "exact": False,
    "local_steps": 3,
    "tf32": True,
    "validate": graphft.Validation(linear(minimized=False), DATA),
}
"""A value other than the default of each option that may have no effect, or that every job has."""
ELSEWHERE = {"name", "data", "trainers", "pservers", "sync", "mode", "ft", "batch_size", "etcd_endpoints", "device"}
ELSEWHERE |= {"pserver_device"}
"""Options that say what and where the job is: they have an effect in every one, and `mode` is refused with sync."""
NOT_IN_PROGRAMS = {"drop_last", "slice_unit", "min_block", "bucket_bytes", "threads", "exact", "lease_ttl"}
NOT_IN_PROGRAMS |= {"on_bad_data", "storage"}
"""Their effect is not in these programs: the plan, the machine, the lease, small tensors, a share of few records, where
the checkpoints are, the size of a folder."""


def transpile(job: str, **options: Any) -> Job:
    local = {"local_steps": 2} if job.startswith("half_async") else {}
    usual = {"batch_size": 3, "trainers": 2, "pservers": 2}
    return graphft.transpile(linear(), data=DATA, **{**usual, **JOBS[job], **local, **options})


@pytest.mark.parametrize("job", JOBS)
def test_an_option_has_an_effect_or_is_refused_or_told(job: str, caplog: pytest.LogCaptureFixture) -> None:
    assert OTHER.keys() | ELSEWHERE == set(OPTIONS)
    plain = transpile(job)
    for name, value in OTHER.items():
        caplog.clear()
        refused = any(name in names and getattr(plain.config, option) != wanted for option, wanted, names in NEEDS)
        if refused or name == "tf32" or (name == "local_steps" and not job.startswith(("half_async", "geo_sgd"))):
            with pytest.raises(GraphftError, match=name) as caught:
                transpile(job, **{name: value})
            assert (caught.value.rule, bool(caught.value.help)) == ("option", True), name
            continue
        made = transpile(job, **{name: value})
        if name in NEEDS_FT and not plain.config.ft:
            assert [name in r.getMessage() for r in caplog.records] == [True]
        else:
            assert name in NOT_IN_PROGRAMS or programs(made) != programs(plain), f"{name} changed nothing"


def programs(job: Job) -> dict[str, str]:
    return {name: str(program) for name, program in job.programs.by_name().items()}


def test_a_default_may_be_given_and_a_saved_job_is_not_looked_at(tmp_path: Any) -> None:
    made = transpile("sync", max_staleness=-1, max_failures=3, dc_lambda=0.04)
    Job.make(made.source, made.config.replace(max_failures=5)).save(tmp_path / "job")
    assert Job.load(tmp_path / "job").config.max_failures == 5
