"""Every option either makes a job another one, or is refused: none is accepted and ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphft
from graphft.errors import GraphftError, UsageError
from graphft.transpiler import Job
from graphft.transpiler.api import OPTIONS
from graphft.transpiler.effects import NEEDS
from tests.support.programs_by_hand import linear

DATA = graphft.arrays(chunk_size=10, x=torch.zeros(30, 200), y=torch.zeros(30, 1))
JOBS: dict[str, dict[str, Any]] = {
    f"{mode}{'-ft' * ft}": {"ft": ft, **({"sync": False, "mode": mode} if mode != "sync" else {})}
    for mode in ("sync", "async", "dc_asgd", "half_async", "geo_sgd")
    for ft in (False, True)
}
OTHER: dict[str, Any] = {
    "dc_lambda": 2.0,
    "dc_decay": 0.5,
    "checkpoint_every": 7,
    "checkpoint_seconds": 7.0,
    "keep_checkpoints": 7,
    "on_trainer_loss": "wait",
    "on_barrier_timeout": "proceed",
    "recovery_timeout": 7.0,
    "chunk_timeout": 7.0,
    "max_failures": 7,
    "on_bad_data": "fail",
    "max_discarded": 0.5,
    "lease_ttl": 7,
    "storage": "file:///shared/run",
    "dispatch": "coordinator",
    "push_timeout": 7.0,
    "max_skipped": 7,
    "max_staleness": 7,
    "on_nonfinite": "skip",
    "daemon_interval": 0.7,
    "passes": 2,
    "passes_on_demand": True,
    "seed": 1,
    "drop_last": True,
    "slice_unit": 128,
    "min_block": 64,
    "bucket_bytes": 1024,
    "threads": 2,
    "exact": False,
    "local_steps": 3,
    "validate": graphft.Validation(linear(minimized=False), DATA),
}
"""A value other than the default of each option that may have no effect, or that every job has."""
ELSEWHERE = {"name", "trainers", "pservers", "sync", "mode", "ft", "batch_size", "etcd_endpoints", "device"}
"""Options that say what and where the job is: they have an effect in every one, and `mode` is refused with sync."""
NOT_IN_PROGRAMS = {"drop_last", "slice_unit", "min_block", "bucket_bytes", "threads", "exact", "lease_ttl"}
NOT_IN_PROGRAMS |= {"on_bad_data", "storage"}
"""Their effect is not in these programs: the plan, the machine, the lease, small tensors, a share of few records, where
the checkpoints are, the size of a folder."""


def transpile(job: str, **options: Any) -> Job:
    local = {"local_steps": 2} if job.startswith("half_async") else {}
    usual = {"batch_size": 3, "trainers": 2, "pservers": 2}
    return graphft.transpile(linear(), chunks=DATA, **{**usual, **JOBS[job], **local, **options})


def test_every_option_is_looked_at() -> None:
    assert OTHER.keys() | ELSEWHERE == set(OPTIONS)
    assert NEEDS.keys() < OTHER.keys()


@pytest.mark.parametrize("job", JOBS)
def test_an_option_has_an_effect_or_is_refused_or_told(job: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = transpile(job)
    for name, value in OTHER.items():
        caplog.clear()
        unmet = [need for need in NEEDS.get(name, ()) if not need.met(plain.config)]
        expected = not unmet
        if name == "local_steps":
            expected = job.startswith(("half_async", "geo_sgd"))
        if expected:
            made = transpile(job, **{name: value})
            assert name in NOT_IN_PROGRAMS or programs(made) != programs(plain), f"{name} changed nothing"
        elif unmet and not any(need.refused for need in unmet):
            transpile(job, **{name: value})
            (told,) = [r.getMessage() for r in caplog.records]
            assert told.startswith(f"{name} is {value!r}, which has no effect: ft is False")
        else:
            with pytest.raises(GraphftError, match=name) as caught:
                transpile(job, **{name: value})
            assert (caught.value.rule, bool(caught.value.help)) == ("option", True), name


def programs(job: Job) -> dict[str, str]:
    return {name: str(program) for name, program in job.programs.by_name().items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": 4, "ft": True}, "max_staleness is 4, which has no effect: sync is True (a sync step waits"),
        ({"sync": False, "dc_lambda": 0.5}, "mode is 'async' (no other mode compensates the delay of gradients)"),
        ({"ft": True, "on_bad_data": "fail", "max_discarded": 0.5}, "on_bad_data is 'fail' (nothing is left out"),
    ],
)
def test_the_error_says_why_and_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        transpile("sync", **options)
    assert message in caught.value.message
    assert caught.value.help.startswith("leave m" if "dc_lambda" not in options else "leave dc_lambda out, or")


def test_a_default_may_be_given_and_a_saved_job_is_not_looked_at(tmp_path: Any) -> None:
    made = transpile("sync", max_staleness=-1, max_failures=3, dc_lambda=0.04)
    Job.make(made.source, made.config.replace(max_failures=5)).save(tmp_path / "job")
    assert Job.load(tmp_path / "job").config.max_failures == 5
