"""Whole roles, run by an Executor in this very process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import graphft
from graphft.errors import GraphftError


def test_an_executor_runs_the_coordinator_of_a_job(tmp_path: Path, etcd_server: object) -> None:
    """It waits for the job, which the launcher runs meanwhile, and returns 0 when that is complete."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    program = graphft.build(model, lambda m, x: m(x).square().mean(), {"x": (None, 4)}, name="executor")
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=torch.randn(64, 4), chunk_size=16)
    name = f"executor-{tmp_path.name}"[:60]
    job = graphft.transpile(program, data=data, batch_size=8, ft=True, lease_ttl=60, name=name)
    endpoints = ",".join(etcd_server.endpoints)  # type: ignore[attr-defined]
    status: list[int] = []
    job.save(tmp_path / "job")
    waiting = threading.Thread(
        target=lambda: status.append(graphft.Executor().run_role(tmp_path / "job", "coordinator", etcd=endpoints))
    )
    waiting.start()
    result = job.run(job_dir=str(tmp_path / "job"), etcd=endpoints, quiet=True)
    waiting.join(120)
    assert status == [0]
    assert result.model.exists()


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match="there is no role 'worker'"):
        graphft.Executor().run_role(tmp_path, "worker")
