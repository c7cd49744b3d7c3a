"""Schedules of faults: a function of the seed, with every kind in it, within the job's steps."""

from __future__ import annotations

import pytest

from graphft.errors import GraphftError
from graphft.runtime.chaos.fault_schedule import CLUSTER_WEIGHTS, COORDINATOR_WEIGHTS, WEIGHTS, kinds_of, make_schedule

KINDS = tuple(WEIGHTS)


def test_a_seed_gives_one_schedule() -> None:
    assert make_schedule(7, 40, KINDS, 1000, 10) == make_schedule(7, 40, KINDS, 1000, 10)
    assert make_schedule(7, 40, KINDS, 1000, 10) != make_schedule(8, 40, KINDS, 1000, 10)


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_if_there_is_room(seed: int) -> None:
    faults = make_schedule(seed, len(KINDS), KINDS, 1000, 10)
    assert sorted(f.kind for f in faults) == sorted(KINDS)
    few = make_schedule(seed, 3, KINDS, 1000, 10)
    assert len({f.kind for f in few}) == 3


@pytest.mark.parametrize("seed", range(20))
def test_faults_lie_within_the_job_in_order(seed: int) -> None:
    faults = make_schedule(seed, 50, KINDS, 1000, 10)
    assert [f.step for f in faults] == sorted(f.step for f in faults)
    assert all(20 <= f.step <= 950 and 0 <= f.target < 1 for f in faults)
    assert faults[0].after is None, "there is nothing yet to recover from"
    assert any(f.after is not None for f in faults)
    assert any(f.after is None for f in faults)


def test_pauses_end_before_the_lease_and_freezes_after_it() -> None:
    faults = [f for seed in range(30) for f in make_schedule(seed, 50, KINDS, 1000, 10)]
    assert all(f.seconds < 0.8 * 10 for f in faults if f.kind.startswith("pause-"))
    assert all(f.seconds > 10 for f in faults if f.kind.startswith("freeze-"))


def test_picking_a_target() -> None:
    for fault in make_schedule(1, 50, KINDS, 1000, 10):
        assert fault.pick([4, 5, 6]) in (4, 5, 6)
        assert fault.pick([9]) == 9


def test_kinds() -> None:
    assert set(kinds_of((), 1)) == {*WEIGHTS}
    assert set(kinds_of((), 3)) == {*WEIGHTS, *CLUSTER_WEIGHTS}
    assert kinds_of(("add-trainer", "kill-job"), 1) == ("add-trainer", "kill-job")
    with pytest.raises(GraphftError, match="no kind of fault 'kill-leader'") as error:
        kinds_of(("kill-leader",), 1)
    assert error.value.rule == "chaos-kind"


def test_only_a_job_with_coordinators_loses_them() -> None:
    assert set(kinds_of((), 1, coordinator=True)) == {*WEIGHTS, *COORDINATOR_WEIGHTS}
    with pytest.raises(GraphftError, match="no kind of fault 'kill-coordinator'"):
        kinds_of(("kill-coordinator",), 1)
    kinds = kinds_of((*COORDINATOR_WEIGHTS, "kill-etcd"), 1, coordinator=True)
    assert {f.kind for f in make_schedule(3, 40, kinds, 1000, 10)} == {*kinds}
