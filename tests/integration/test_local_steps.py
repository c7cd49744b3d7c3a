"""Local accumulation by real processes: every unit once on every shard, whoever is killed, or leaves, inside one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from graphft import ir
from graphft.runtime.chaos.compare import final_ledgers, not_once
from graphft.transpiler import Job
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, at, kill, play, send
from tests.integration.test_async import trained

pytestmark = pytest.mark.timeout(600)
UNITS = 11 * 3 + 1
"""Of a pass: 11 chunks of 5 batches, and one of a single one, in units of 2."""


def local_job(program: ir.Program, mode: str, **options: Any) -> Job:
    return training.job(program, sync=False, mode=mode, local_steps=2, trainers=2, **options)


def assert_exact(played: Played) -> None:
    """Every unit is in every shard's ledger, and each was applied once."""
    assert not_once(played.job, played.folder) == []
    assert {version for version, _ in final_ledgers(played.job, played.folder)} == {UNITS * training.PASSES}
    counts = {int(value) for name, value in played.state.items() if name.endswith("@step")}
    assert counts == (set() if played.job.config.mode == "geo_sgd" else {UNITS * training.PASSES})


@pytest.mark.slow
def test_trainers_and_shards_are_killed_and_leave(program: ir.Program, folder: Path, pace: Pace) -> None:
    played = play(
        local_job(program, "geo_sgd", pace=pace.file, lease_ttl=60),
        folder,
        [
            Act(lambda s: at(15)(s) and len(s.trainers) == 2, kill("trainer", 1)),
            Act(lambda s: at(30)(s) and len(s.trainers) == 2, kill("pserver", 0)),
            Act(lambda s: s.generation == 1 and at(40)(s), send(signal.SIGTERM, "trainer", 0)),
            Act(lambda s: at(45)(s) and len(s.trainers) == 1, lambda _: pace.set(0)),
        ],
    )
    assert_exact(played)
    assert trained(played)
    assert played.result.preemptions == {"trainer 1": 1, "pserver 0": 1}
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
