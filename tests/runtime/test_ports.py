"""Ports of a trainer by themselves: no process, no etcd, no sockets behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

import graphft
from graphft.ops.context import ChunkWork
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.records import Generation, Registration
from graphft.runtime.data import BatchKey
from graphft.runtime.process.progress import Progress
from graphft.runtime.process.work_record import Phase, WorkRecord
from graphft.runtime.protocol.events import Rollback, ShardDown, ShardUp, SlotGained, SlotLost
from graphft.runtime.roles.trainer.batches import Batches
from graphft.runtime.roles.trainer.finite_check import FiniteCheck
from graphft.runtime.roles.trainer.state import TrainerState
from graphft.runtime.roles.trainer.view import SyncTrainerView, TrainerView
from graphft.transpiler.job import Job

GENERATION = Generation(0, 0)


def shard(life: str) -> Registration:
    return Registration(life, f"tcp://{life}", 1, "host")


class Watched:
    """A member, and the bar, as far as a view needs them."""

    def __init__(self) -> None:
        self.id, self.index, self.view = "0-me", 0, JobView()
        self.woken = self.updates = 0

    def wake(self) -> None:
        self.woken += 1

    def update(self) -> None:
        self.updates += 1


def events(port: TrainerView, watched: Watched, view: JobView) -> list[Any]:
    """The main thread is to take these in after the next look."""
    watched.view = view
    port.watch()
    found = list(port.state.control)
    port.state.control.clear()
    return found


def test_shards_that_come_and_go_become_events() -> None:
    watched: Any = Watched()
    port = TrainerView(watched, TrainerState(), watched)
    assert events(port, watched, JobView({0: shard("a"), 2: shard("c")})) == [ShardUp(0, "a"), ShardUp(2, "c")]
    assert events(port, watched, JobView({0: shard("b"), 2: shard("c")})) == [ShardDown(0), ShardUp(0, "b")]
    assert events(port, watched, JobView({0: shard("b")})) == [ShardDown(2)]
    assert events(port, watched, JobView({0: shard("b")})) == []
    assert port.state.addresses == {life: f"tcp://{life}" for life in "abc"}, "an event may be older than the view"
    assert (watched.woken, watched.updates) == (4, 4)


def test_a_sync_trainer_is_told_of_generations_and_of_its_slots() -> None:
    watched: Any = Watched()
    port = SyncTrainerView(watched, TrainerState(), watched, claims=True)
    assert events(port, watched, JobView({0: shard("a")})) == []
    assert watched.woken == 0, "no pserver has begun the job"
    begun = JobView({0: shard("a")}, slots={0: "0-me", 1: "1-other"}, claims={0: 5, 1: 6}, generation=GENERATION)
    assert events(port, watched, begun) == [Rollback(0, 0), ShardUp(0, "a"), SlotGained(0, 5)]
    assert port.state.lost_at == float("-inf")
    again = JobView({0: shard("a")}, slots={0: "0-me"}, claims={0: 9}, generation=Generation(1, 4))
    assert events(port, watched, again) == [Rollback(1, 4), SlotLost(0, 5), SlotGained(0, 9)]
    assert port.state.lost_at > 0


def test_without_claims_a_trainer_has_the_slot_of_its_index_for_good() -> None:
    watched: Any = Watched()
    port = SyncTrainerView(watched, TrainerState(), watched, claims=False)
    assert events(port, watched, JobView(generation=GENERATION)) == [Rollback(0, 0), SlotGained(0, 0)]
    assert events(port, watched, JobView({0: shard("a")}, generation=GENERATION)) == [ShardUp(0, "a")]


def batches_of(job: Job, state: TrainerState, folder: Path, **options: Any) -> Any:
    link: Any = SimpleNamespace(
        member=SimpleNamespace(config=SimpleNamespace(batch_size=4), progress=Progress()),
        program=graphft.Program("p"),
        state=state,
        work_record=WorkRecord(folder / "record"),
        check=FiniteCheck(job.trainer_program(), {}),
    )
    return Batches(link, Mock(), Mock(), **options)


def test_a_batch_is_noted_while_it_is_read_and_computed(job: Job, tmp_path: Path) -> None:
    state, phases = TrainerState(), list[Phase]()
    port, columns = batches_of(job, state, tmp_path), {"x": torch.ones(4), "y": torch.zeros(1)}
    port.prefetcher.get = lambda key: phases.append(port.work_record.phase) or columns
    work = ChunkWork(1, 2, 3, samples=4, seed=0)
    assert port.batch(work, ["x"]) == [columns["x"]]
    assert (phases, port.work_record.phase) == ([Phase.READING], Phase.COMPUTING)
    assert (state.work, state.batch_samples) == (work, 4)


def test_of_a_unit_the_first_batch_is_read_ahead(job: Job, tmp_path: Path) -> None:
    state = TrainerState(careful=1)
    port = batches_of(job, state, tmp_path, count=5)
    unit = ChunkWork(0, 1, 2, samples=20, seed=0, without=frozenset({7}))
    port.read_ahead(unit)
    port.prefetcher.schedule.assert_not_called()  # the process before died at work
    state.computed(4)
    port.read_ahead(unit)
    port.schedule(replace(unit, batch=12, samples=0))
    port.prefetcher.schedule.assert_called_once_with(BatchKey(0, 1, 10, 4, unit.without))
