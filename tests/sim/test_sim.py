"""Jobs of real roles in a simulated world, under faults of every kind. `python -m tests.sim` runs more seeds.

A process runs all scenarios of a mode: while a simulation runs, graphft's modules have another `time` and `threading`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import pytest

pytestmark = pytest.mark.timeout(480)
"""The first test of a mode runs all of its scenarios."""

HANG_SECONDS = 420

SYNC = ("faults=4", "bad-batches=2", "nonfinite=2", "calm=1", "bad-lines=2", "cut-off=2", "late-trainer=2")
SYNC += ("on-demand=2", "validation=3")
ASYNC = ("faults=4", "bad-batches=2", "nonfinite=2", "calm=1", "bad-lines=2")
COORDINATOR = ("faults=3", "bad-batches=2", "calm=1")
JOBS = {
    "--mode sync": SYNC,
    "--mode async": ASYNC,
    "--mode sync --dispatch coordinator": COORDINATOR,
    "--mode async --dispatch coordinator": COORDINATOR,
}
COUNTED = {
    "bad-batches": "discarded",
    "bad-lines": "discarded",
    "cut-off": "blocked",
    "on-demand": "passes asked for",
    "validation": "validations",
}
"""By scenario, what its seeds must have met."""
ONCE_FAILED = {
    "--mode sync": (
        "faults=1@8101490",  # a restored etcd that lacks a registration, and the record of a shard's start
        "faults=1@8101654",
        "faults=1@5000125",  # a final checkpoint that a restored etcd does not know is committed again
        "faults=1@7201051",  # what a restored etcd has lost is made good
        "faults=1@7205725",
        "nonfinite=1@7201429",
        "bad-batches=1@4001468",  # which records are left out does not depend on who is ahead
        "on-demand=1@1102",  # a batch that counts has its row
        "on-demand=1@1280",  # a pass ends though its last contribution was lost
        "on-demand=1@1466",
    ),
    "--mode sync --dispatch coordinator": (
        "faults=1@8201527",  # a coordinator sees a restored etcd uncalled
        "faults=1@9800919",  # the job ends while a shard waits for its checkpoints
    ),
}


@cache
def simulate(options: str, first: int, scenarios: Sequence[str]) -> list[str]:
    """Returns what `python -m tests.sim` prints."""
    more = ["--workers", "1", "--first", str(first), "--scenario", *scenarios, *options.split()]
    command = [sys.executable, "-m", "tests.sim", *more]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:  # once, not in each test that looks at these results
        return [f"{' '.join(command)} hangs"]
    return (done.stdout + done.stderr[-4000:]).splitlines()


def check(lines: Sequence[str], scenario: str, count: str, options: str) -> str:
    """Returns the line that says that nothing was wrong with any seed of the scenario."""
    good = f"--scenario {scenario} {options}: {count} of {count} seeds as they should be"
    line = next((line for line in lines if line.startswith(good)), "")
    assert line, "\n".join(lines)
    return line


@pytest.mark.parametrize(("options", "scenario"), [(job, one) for job, several in JOBS.items() for one in several])
def test_disturbed_runs_equal_the_undisturbed_one(options: str, scenario: str) -> None:
    """Seeds from 20 on: some of their records are discarded."""
    name, _, count = scenario.partition("=")
    line = check(simulate(options, 20, JOBS[options]), name, count, options)
    assert f"'{COUNTED.get(name, '')}" in line


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--mode sync", "--mode async"])
def test_more_seeds(options: str) -> None:
    for scenario in JOBS[options]:
        name, _, count = scenario.partition("=")
        check(simulate(options, 24, JOBS[options]), name, count, options)


@pytest.mark.parametrize(("options", "scenario"), [(o, one) for o, some in ONCE_FAILED.items() for one in some])
def test_seeds_that_once_failed(options: str, scenario: str) -> None:
    name, _, first = scenario.partition("=1@")
    check(simulate(options, 0, ONCE_FAILED[options]), name, "1", f"{options} --first {first}")


def test_a_seed_replays_exactly() -> None:
    """Also its story, in another process: times, order, and every line that a role has logged."""
    printed = "\n".join(simulate("--twice --workers 2", 0, ("faults=2",)))
    assert "4 of 4 seeds as they should be" in printed, printed
