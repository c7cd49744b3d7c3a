"""The sync queue's records in a real etcd: who may change them, and what is left when something fails half-way."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from graphft.ops.context import NoData, WorkChanged
from graphft.runtime.coordination.records import Committed, Generation, decode
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import Ambiguous, EtcdUnreachable
from graphft.runtime.protocol.events import Work
from graphft.runtime.queue.passes import close_passes
from graphft.transpiler.job import Job
from tests.runtime.trainers import TERMS, Stage, Staged, shards_at
from tests.support.programs_by_hand import linear_job
from tests.support.waiting import until

CHUNKS = 250


@pytest.fixture(scope="module")
def long_job() -> Job:
    """250 chunks of two batches, two slots, two passes."""
    return linear_job(2 * CHUNKS, 2, features=8, batch_size=1, epochs=2, max_failures=1)


@pytest.fixture
def scene(staged: Staged, long_job: Job) -> Stage:
    return staged(long_job).begun()


def generation_of(scene: Stage) -> Generation | None:
    return decode(scene.etcd.get(scene.keys.generation), Generation)


def begin(scene: Stage, trainer: Any, step: int = 0, slot: int = 0) -> None:
    """The trainer holds the slot, whoever did before, and begins the step's pass."""
    scene.etcd.put(scene.keys.slot(slot), trainer.member.id.encode(), trainer.member.lease)
    trainer.ctx.step, trainer.ctx.slot = step, slot
    trainer.queue.begin_pass()
    trainer.state.pass_index = trainer.plan.pass_of(step)


def chunk_at(scene: Stage, step: int = 0, slot: int = 0) -> int:
    located = scene.job.config.plan.locate(step, slot)
    assert located is not None
    return located.chunk


def complete(trainer: Any) -> None:
    """The trainer records what it knows to be applied."""
    trainer.queue.complete()
    trainer.queue.settle()


def test_a_chunk_is_done_when_its_last_batch_is_applied_not_when_it_was_read(scene: Stage) -> None:
    trainer = scene.trainer(0)
    begin(scene, trainer)
    chunk = chunk_at(scene)
    for version in (0, 1):  # batch 1 is computed from version 1, and applied in version 2
        shards_at(trainer, version)
        trainer.ctx.step = version
        assert trainer.queue.get(TERMS).chunk == chunk
        complete(trainer)
        assert chunk in scene.records()["pending"]
    shards_at(trainer, 2)
    complete(trainer)
    records = scene.records()
    assert records["done"] == {chunk}
    assert chunk not in records["pending"] | records["todo"]


def test_at_a_high_pace_chunks_are_claimed_and_completed_together(scene: Stage) -> None:
    trainer = scene.trainer(0)
    trainer.state.times.extend([(0.0, 1), (0.2, 1), (0.4, 1)])  # five batches per second: three chunks of two
    begin(scene, trainer)
    trainer.queue.get(TERMS)
    chunks = [chunk_at(scene, step) for step in (0, 2, 4)]
    assert scene.records()["pending"] == set(chunks)
    assert {claim.revision for claim in trainer.queue.claims.values()} == {trainer.queue.get(TERMS).claim}
    trainer.member.etcd.store.before_txn = lambda: pytest.fail("a transaction on the way")
    for step in (1, 2, 3, 4):
        shards_at(trainer, step)
        trainer.ctx.step = step
        assert trainer.queue.get(TERMS).chunk == chunks[step // 2]
        complete(trainer)
    trainer.member.etcd.store.before_txn = None
    trainer.ctx.step = 5
    trainer.queue.get(TERMS)
    until(lambda: len(scene.records()["pending"]) == 6)
    shards_at(trainer, 6)
    complete(trainer)
    assert scene.records()["done"] == set(chunks)
    assert scene.records()["pending"] == {chunk_at(scene, step) for step in (6, 8, 10)}
    trainer.queue.release(0)
    assert "pending" not in scene.records()
    assert len(scene.records()["todo"]) == CHUNKS - 3


def test_whoever_lost_the_slot_claims_nothing(scene: Stage) -> None:
    trainer, other = scene.trainer(0), scene.trainer(1)
    begin(scene, trainer)
    begin(scene, other)
    with pytest.raises(WorkChanged):
        trainer.queue.get(TERMS)
    assert "pending" not in scene.records()


@pytest.mark.parametrize("applied", [False, True])
def test_a_claim_that_etcd_did_not_answer_is_made_once(scene: Stage, applied: bool) -> None:
    trainer = scene.trainer(0)
    begin(scene, trainer)
    seen = []

    def fail() -> None:
        seen.append((dict(trainer.queue.claims), scene.records().get("pending")))
        raise Ambiguous("no answer") if applied else EtcdUnreachable("away")

    setattr(trainer.member.etcd.store, "after_txn" if applied else "before_txn", fail)
    trainer.queue.get(TERMS)
    chunk = chunk_at(scene)
    assert seen == [({}, {chunk} if applied else None)]
    assert scene.records()["pending"] == {chunk}
    shards_at(trainer, 2)
    complete(trainer)
    assert scene.records()["done"] == {chunk}


def test_a_claim_without_progress_is_taken_away_by_anybody(scene: Stage) -> None:
    stuck = scene.trainer(0)
    begin(scene, stuck)
    stuck.queue.get(TERMS)
    looking = scene.trainer(1)
    looking.state.pass_index = 0
    looking.queue.renew(0.2)
    assert scene.records()["pending"] == {chunk_at(scene)}
    time.sleep(0.3)
    looking.queue.renew(0.2)
    assert "pending" not in scene.records()
    assert chunk_at(scene) in scene.records()["todo"]
    assert scene.etcd.get(scene.keys.slot(0)) is None, "nor does it keep the slot"


def test_a_trainer_that_begins_the_pass_late_changes_nothing(scene: Stage) -> None:
    late, successor = scene.trainer(0), scene.trainer(1)
    before = []

    def others_go_on() -> None:
        begin(scene, successor)
        successor.queue.get(TERMS)
        shards_at(successor, 2)
        complete(successor)
        before.append((scene.records(), scene.etcd.get(scene.keys.pass_)))

    late.member.etcd.store.before_txn = others_go_on
    late.ctx.step, late.ctx.slot = 0, 0
    late.queue.begin_pass()
    assert before == [(scene.records(), scene.etcd.get(scene.keys.pass_))]
    assert scene.records()["done"] == {chunk_at(scene)}


def discarded(scene: Stage) -> dict[int, tuple[int, int]]:
    """By chunk, the pass and the batch that is discarded of it; tests leave one out of each at most."""
    return {
        c: (o.discards[0].pass_index, o.discards[0].batch) for c, o in read_discards(scene.etcd, scene.keys).items()
    }


@pytest.mark.parametrize("saved", [False, True])
def test_a_new_generation_begins_where_a_batch_is_discarded(scene: Stage, saved: bool) -> None:
    if saved:
        scene.etcd.put(scene.keys.committed, msgspec.json.encode(Committed(0, 4, "step-4.g0")))
    trainer = scene.trainer(0)
    begin(scene, trainer)
    for failures in (1, 2):
        trainer.queue.get(TERMS._replace(max_failures=2))
        trainer.queue.report_failure(Work(0, 0), "it cannot be read")
        generation = generation_of(scene)
        assert generation is not None
        assert (generation.number == 1) == (chunk_at(scene) in discarded(scene)) == (failures == 2)
        trainer.queue.rolled_back()
    assert (generation.step, generation.checkpoint) == ((4, "step-4.g0") if saved else (0, ""))
    assert f"batch 0 of chunk {chunk_at(scene)} in pass 0 failed 2 times in a row" in generation.reason
    with pytest.raises(NoData):
        trainer.queue.get(TERMS)


def test_nothing_is_claimed_of_a_job_that_is_over(scene: Stage) -> None:
    trainer = scene.trainer(0)
    begin(scene, trainer)
    close_passes(scene.etcd, scene.keys, trainer.plan, trainer.plan.total_steps)
    scene.etcd.put(scene.keys.state, b"complete")
    with pytest.raises(WorkChanged):
        trainer.queue.get(TERMS)
    assert scene.records().keys() == {"done"}
