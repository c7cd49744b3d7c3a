"""Jobs of real roles in a simulated world, under faults of every kind. `python -m tests.sim` runs more seeds.

A process runs all scenarios of a mode: while a simulation runs, graphft's modules have another `time` and `threading`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

pytestmark = pytest.mark.timeout(480)
"""The first test of a mode runs all of its scenarios."""

HANG_SECONDS = 420

SEEDS = {
    "sync": (
        "faults=4",
        "bad-batches=2",
        "nonfinite=2",
        "calm=1",
        "bad-lines=2",
        "cut-off=2",
        "late-trainer=2",
        "on-demand=2",
        "validation=3",
    ),
    "async": ("faults=4", "bad-batches=2", "nonfinite=2", "calm=1", "bad-lines=2"),
}
ONES = (
    "faults=1@5000125",
    "faults=1@7201051",
    "faults=1@7205725",
    "nonfinite=1@7201429",
    "bad-batches=1@4001468",
    "on-demand=1@1102",
    "on-demand=1@1280",
    "on-demand=1@1466",
)
"""Seeds that once failed, each in the test that says at what: all in sync mode, and in one process."""


def simulate(*options: str) -> list[str]:
    """What `python -m tests.sim OPTIONS` prints."""
    command = [sys.executable, "-m", "tests.sim", "--workers", "1", *options]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:  # once, not in each test that looks at these results
        return [f"{' '.join(command)} hangs"]
    return (done.stdout + done.stderr[-4000:]).splitlines()


@cache
def results(mode: str) -> list[str]:
    """Of all scenarios. Seeds from 20 on: some of their records are discarded."""
    return simulate("--mode", mode, "--first", "20", "--keep-going", "--scenario", *SEEDS[mode])


@cache
def ones() -> list[str]:
    return simulate("--keep-going", "--scenario", *ONES)


def check_one(scenario: str, seed: str) -> None:
    good = f"--scenario {scenario} --mode sync --first {seed}: 1 of 1 seeds as they should be"
    assert f"{scenario}=1@{seed}" in ONES
    assert any(line.startswith(good) for line in ones()), "\n".join(ones())


def check(mode: str, scenario: str) -> str:
    """The line that says that nothing was wrong with any seed of the scenario."""
    count = next(text.partition("=")[2] for text in SEEDS[mode] if text.startswith(scenario))
    good = f"--scenario {scenario} --mode {mode}: {count} of {count} seeds as they should be"
    lines = results(mode)
    line = next((line for line in lines if line.startswith(good)), "")
    assert line, "\n".join(lines)
    return line


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_disturbed_runs_equal_the_undisturbed_one(mode: str) -> None:
    """Whatever is killed, stopped, cut off, lost or repeated."""
    check(mode, "faults")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_more_seeds(mode: str) -> None:
    lines = simulate("--mode", mode, "--first", "24", "--keep-going", "--scenario", *SEEDS[mode])
    good = [line for line in lines if "seeds as they should be" in line]
    assert len(good) == len(SEEDS[mode]), "\n".join(lines)
    assert not any("replay:" in line for line in lines), "\n".join(lines)


def test_passes_on_demand_equal_those_that_follow_one_another() -> None:
    """Some are asked for long after the one before: nothing is late meanwhile."""
    assert "'passes asked for': " in check("sync", "on-demand")


@pytest.mark.parametrize("seed", ["1280", "1466"])
def test_a_pass_ends_though_its_last_contribution_was_lost(seed: str) -> None:
    """Its trainer waits for the next pass to be asked for, and nobody asks before this one is done."""
    check_one("on-demand", seed)


def test_a_batch_that_counts_has_its_row() -> None:
    """A trainer dies before it writes the row of a batch, which must not have been sent so far: callbacks would never
    be told of its step."""
    check_one("on-demand", "1102")


def test_validations_and_what_they_decide_are_those_of_the_undisturbed_job() -> None:
    check("sync", "validation")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_shards_agree_on_what_is_discarded(mode: str) -> None:
    """Batches that cannot be read, among all other faults: what is discarded is discarded everywhere."""
    assert "'discarded': " in check(mode, "bad-batches")


def test_which_records_a_sync_job_leaves_out_does_not_depend_on_who_is_ahead() -> None:
    """A trainer that reads the next pass finds the bad record there first, in a batch of other records."""
    check_one("bad-batches", "4001468")


def test_a_final_checkpoint_that_a_restored_etcd_does_not_know_is_committed_again() -> None:
    """Else its shards wait for the commit, and trainers for work, for ever."""
    check_one("faults", "5000125")


@pytest.mark.parametrize(("scenario", "seed"), [("faults", "7201051"), ("nonfinite", "7201429"), ("faults", "7205725")])
def test_what_a_restored_etcd_has_lost_is_made_good(scenario: str, seed: str) -> None:
    """Keys, parts and claims of which the backup does not know."""
    check_one(scenario, seed)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_jobs_whose_tasks_a_coordinator_gives_out(mode: str) -> None:
    """With one coordinator or two, which are killed, stopped and cut off as all others are."""
    lines = simulate(
        "--mode",
        mode,
        "--dispatch",
        "coordinator",
        "--first",
        "20",
        "--scenario",
        "faults=3",
        "bad-batches=2",
        "calm=1",
    )
    for scenario in ("faults", "bad-batches", "calm"):
        good = f"--scenario {scenario} --mode {mode} --dispatch coordinator: "
        assert any(line.startswith(good) and "seeds as they should be" in line for line in lines), "\n".join(lines)
    assert not any("replay:" in line for line in lines), "\n".join(lines)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_without_faults_repeats_nothing(mode: str) -> None:
    check(mode, "calm")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_lines_that_no_trainer_can_read_end_no_process(mode: str) -> None:
    """A trainer that was not yet in the generation without them began the same work again, and ended."""
    assert "'discarded': " in check(mode, "bad-lines")


def test_a_trainer_cut_off_from_a_shard_does_not_stop_the_job() -> None:
    """It reaches etcd, so its lease lives, and it holds its slots. The others get them.

    Either nothing passes between the two, or contributions alone are lost: the trainer believes that all is well.
    """
    assert "'blocked': " in check("sync", "cut-off")


def test_a_late_trainer_finds_the_others_ready() -> None:
    """Those that waited for it were taken for stuck: they lost their slots, and were barred for minutes."""
    check("sync", "late-trainer")


def test_a_seed_replays_exactly() -> None:
    """Also its story, in another process: times, order, and every line that a role has logged."""
    printed = "\n".join(simulate("--workers", "2", "--seeds", "2", "--twice"))
    assert "4 of 4 seeds as they should be" in printed, printed
