"""A pass that is over has no open record, whatever happened at the boundary of two passes or at the job's end.

Real trainers on a real etcd, and a job of one chunk: slot 0 computes its two batches in each of two passes.
"""

from __future__ import annotations

from typing import Any

import pytest

from graphft.ops.context import WorkChanged
from graphft.runtime.protocol import chunk_queue
from graphft.runtime.protocol.events import Rollback
from graphft.runtime.queue.passes import close_passes
from graphft.transpiler.job import Job
from tests.runtime.trainers import TERMS, Stage, Staged, shards_at
from tests.support.programs_by_hand import linear_job
from tests.support.waiting import until

LAST = 3
DONE = {"done": {0}}


@pytest.fixture(scope="module")
def short_job() -> Job:
    return linear_job(4, 4, features=8, batch_size=2, epochs=2)


@pytest.fixture
def scene(staged: Staged, short_job: Job) -> Stage:
    return staged(short_job).begun()


def work_at(scene: Stage, trainer: Any, step: int) -> None:
    """The trainer holds slot 0, and begins its batch of this step."""
    scene.etcd.put(scene.keys.slot(0), trainer.member.id.encode(), trainer.member.lease)
    shards_at(trainer, step)
    enter(trainer, step)
    trainer.queue.get(TERMS)


def enter(trainer: Any, step: int) -> None:
    trainer.ctx.step, trainer.ctx.slot = step, 0
    trainer.queue.begin_pass()
    trainer.state.pass_index = trainer.plan.pass_of(step)


def finish(trainer: Any) -> None:
    """All shards have applied the last step; the first one closes what is open."""
    shards_at(trainer, LAST + 1, trainer.shards.machine.generation if trainer.shards.machine else 0)
    until(lambda: trainer.shards.finished)
    trainer.queue.forget_claims()
    close_passes(trainer.member.etcd, trainer.member.keys, trainer.plan, trainer.plan.total_steps)


def test_what_is_done_again_after_the_end_is_closed_again(scene: Stage) -> None:
    trainer = scene.trainer(0)
    work_at(scene, trainer, LAST - 1)
    finish(trainer)
    assert scene.records(1) == DONE
    trainer.comm.control(Rollback(1, LAST - 1))
    shards_at(trainer, LAST - 1, generation=1)
    enter(trainer, LAST - 1)
    trainer.queue.get(TERMS)
    assert "todo" in scene.records(1)
    finish(trainer)
    assert scene.records(1) == DONE


@pytest.mark.parametrize("how", ["handed over", "lost"])
def test_a_slot_that_goes_behind_its_chunks_last_batch_leaves_the_chunk_done(scene: Stage, how: str) -> None:
    holder, other = scene.trainer(0), scene.trainer(1)
    work_at(scene, holder, 1)
    for trainer in (holder, other):
        shards_at(trainer, 2)
    enter(other, 2)
    assert scene.records(0) == {"todo": {0}, "pending": {0}}, "it is its holder's to complete"
    holder.queue.release(0) if how == "handed over" else holder.queue.lost(0)
    holder.queue.settle()
    assert scene.records(0) == DONE


def test_whoever_lost_the_slot_puts_nothing_back(scene: Stage) -> None:
    late, other = scene.trainer(0), scene.trainer(1)
    work_at(scene, late, 0)
    scene.etcd.put(scene.keys.slot(0), other.member.id.encode(), other.member.lease)
    late.queue.claims.clear()
    scene.etcd.delete(chunk_queue.todo_key(scene.keys.queue(0), 0))
    scene.etcd.delete(chunk_queue.pending_key(scene.keys.queue(0), 0))
    scene.etcd.put(chunk_queue.done_key(scene.keys.queue(0), 0), b"{}")
    with pytest.raises(WorkChanged):
        late.queue.get(TERMS)
    assert scene.records(0) == DONE


def test_a_record_that_changes_while_the_job_is_closed_is_looked_at_again(scene: Stage) -> None:
    holder, trainer = scene.trainer(0), scene.trainer(1)
    work_at(scene, holder, LAST)
    todo = chunk_queue.todo_key(scene.keys.queue(1), 0)

    def renew() -> None:
        kv = scene.etcd.get(todo)
        if kv is not None:
            scene.etcd.put(todo, kv.value)

    def twice() -> None:
        renew()
        trainer.member.etcd.store.before_txn = renew

    enter(trainer, LAST)
    trainer.member.etcd.store.before_txn = twice
    finish(trainer)
    assert scene.records(1) == DONE
