"""Jobs of real roles in a simulated world, under faults of every kind. `python -m tests.sim` runs more seeds.

Each test is a process of its own: while a simulation runs, graphft's modules have another `time`, `threading` and `os`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from graphft.runtime.process.role_process import EXIT_OK


def simulate(*options: str | int) -> str:
    """What `python -m tests.sim OPTIONS` prints; it must find nothing wrong."""
    command = [sys.executable, "-m", "tests.sim", *map(str, options)]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True)
    assert done.returncode == EXIT_OK, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_disturbed_runs_equal_the_undisturbed_one(mode: str) -> None:
    """Pitfalls 1, 3, 4, 7, 8, 22, 81, 82, 83: whatever is killed, stopped, cut off, lost or repeated."""
    simulate("--mode", mode, "--seeds", 30, "--workers", 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_shards_agree_on_what_is_discarded(mode: str) -> None:
    """Pitfall 84: batches that cannot be read, among all other faults: what is left out is left out everywhere."""
    told = simulate("--mode", mode, "--scenario", "bad-batches", "--first", 20, "--seeds", 8, "--workers", 1)
    assert "'discarded': " in told


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_without_faults_repeats_nothing(mode: str) -> None:
    simulate("--mode", mode, "--scenario", "calm", "--seeds", 5, "--workers", 1)


def test_a_trainer_cut_off_from_a_shard_does_not_stop_the_job() -> None:
    """Pitfall 34: it reaches etcd, so its lease lives, and it holds its slots. The others get them.

    Either nothing passes between the two, or contributions alone are lost: the trainer believes that all is well.
    """
    told = simulate("--scenario", "cut-off", "--seeds", 8, "--workers", 1)
    assert "'blocked': " in told


def test_a_late_trainer_finds_the_others_ready() -> None:
    """Pitfall 85: those that waited for it were taken for stuck: they lost their slots, and were barred for minutes."""
    simulate("--scenario", "late-trainer", "--seeds", 3, "--workers", 1)


def test_a_seed_replays_exactly() -> None:
    """Also its story: times, order, and every line that a role has logged."""
    assert simulate("--seed", 5) == simulate("--seed", 5)
