"""Sync jobs under faults end with the parameters of the undisturbed run. `python -m tests.sim` runs more seeds."""

from __future__ import annotations

import pytest

from graphft.runtime.protocol.messages import Empty, Push
from tests.sim.job import SimJob


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_disturbed_runs_equal_the_undisturbed_one(first: int) -> None:
    """Pitfalls 1, 3, 4, 7, 8, 22: whatever is killed, stopped, cut off, repeated or reordered on the way."""
    for seed in range(first, first + 20):
        SimJob(seed).run()


@pytest.mark.parametrize("first", range(540, 600, 20))
def test_shards_agree_on_what_is_discarded(first: int) -> None:
    """Batches that fail now and then become poison, also when a holder before has sent them to some of the shards."""
    discarded = 0
    for seed in range(first, first + 20):
        discarded += len(SimJob(seed, flaky=0.2).run().store.discarded)
    assert discarded > 20


def test_a_run_without_faults_refuses_and_repeats_nothing() -> None:
    for seed in range(300, 310):
        job = SimJob(seed, faults=False)
        job.network.duplicates, job.network.reorder = 0.0, False
        job.run()
        assert job.store.rollbacks == 0
        wasted = {name: n for name, n in job.counts.items() if name.startswith("refused") or name == "void-push"}
        assert not wasted, job.describe()


@pytest.mark.parametrize("kinds", [(), (Push, Empty)])
def test_a_trainer_cut_off_from_a_shard_does_not_stop_the_job(kinds: tuple[type, ...]) -> None:
    """Pitfall 34: it reaches the store, so its lease lives, and it holds its slots. The others get them.

    Either nothing passes between the two, or contributions alone are lost: the trainer believes that all is well.
    """
    barred = 0
    for seed in range(700, 720):
        job = SimJob(seed, faults=False)
        job.start_trainer()
        job.world.after(job.world.rng.uniform(0.2, 1.0), lambda job=job, kinds=kinds: job.block(*kinds))
        job.run()
        barred += job.store.bars > 0
    assert barred > 10, "most jobs could not have ended otherwise"


def test_a_seed_replays_exactly() -> None:
    assert list(SimJob(5).run().world.lines) == list(SimJob(5).run().world.lines)
