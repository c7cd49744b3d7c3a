"""Async training by real processes: every batch once on every shard, whatever trainer is killed, added or stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft import ir
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.transpiler.job import Job
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, at, kill, play, send

pytestmark = pytest.mark.timeout(600)


def async_job(program: ir.Program, **options: Any) -> Job:
    return training.job(program, sync=False, trainers=2, **options)


def ledgers(played: Played) -> list[dict[str, Any]]:
    store = CheckpointStore(played.folder / "checkpoints")
    last = next(iter(store.manifests()))
    return [json.loads(store.read_part(last, shard)[1]) for shard in range(played.job.config.pservers)]


def assert_exact(played: Played) -> None:
    """Every (pass, chunk, batch) is in every shard's ledger, and no optimizer made a step more or less than that."""
    plan = played.job.config.plan
    whole = {str(p): {"whole": [[0, len(plan.records)]], "partly": {}} for p in range(plan.passes)}
    assert ledgers(played) == [whole] * played.job.config.pservers
    counts = {name: value for name, value in played.state.items() if name.endswith("@step")}
    assert counts
    assert {int(value) for value in counts.values()} == {plan.total_steps}


def trained(played: Played) -> bool:
    model = training.network()
    graphft.load_into(model, played.result.model)
    data = training.Blobs()
    with torch.no_grad():
        return float((model.eval()(data.x).argmax(1) == data.y).float().mean()) > 0.7


def test_trainers_die_join_and_leave(program: ir.Program, folder: Path, pace: Pace) -> None:
    played = play(
        async_job(program, pace=pace.file, lease_ttl=60),
        folder,
        [
            Act(lambda s: at(20)(s) and len(s.trainers) == 2, kill("trainer", 1)),
            Act(lambda s: len(s.trainers) == 2 and s.step >= 40, lambda supervisor: supervisor.add("trainer", 2)),
            Act(lambda s: len(s.trainers) == 3, send(signal.SIGTERM, "trainer", 0)),
            Act(lambda s: len(s.trainers) == 2, lambda _: pace.set(0)),
        ],
    )
    assert_exact(played)
    assert trained(played)
    assert played.result.preemptions == {"trainer 1": 1}
    last = played.statuses[-1]
    assert (last.generation, last.queue) == (0, {"todo": 0, "pending": 0, "done": 12})
    assert all(s["counters"].get("duplicate-batch", 0) <= 1 for s in last.pservers.values()), "a chunk goes on inside"
