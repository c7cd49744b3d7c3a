"""The async queue's records in a real etcd: when a pass is over, and what counts as done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from graphft.ops.context import ClaimTerms, EndOfPass
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.records import Generation
from graphft.runtime.etcd import Ambiguous
from graphft.runtime.etcd.model import MAX_TXN_OPS
from graphft.runtime.protocol.chunk_queue import Discard, Discards
from graphft.runtime.protocol.ledger import Ledger
from graphft.runtime.queue import chunk_queue
from graphft.runtime.queue.passes import Requeue
from graphft.transpiler.config import MAX_ASYNC_PSERVERS
from graphft.transpiler.job import Job
from tests.runtime.trainers import TERMS, Stage, Staged, shards_at
from tests.support.programs_by_hand import linear_job
from tests.support.waiting import until

CHUNKS, BATCHES = 4, 20
"""Chunks are so long that they are claimed one by one."""


@pytest.fixture(scope="module")
def async_job() -> Job:
    options = {"pservers": 2, "sync": False, "epochs": 2, "max_failures": 1, "max_discarded": 1.0}
    return linear_job(CHUNKS * BATCHES, BATCHES, batch_size=1, **options)


@pytest.fixture
def scene(staged: Staged, async_job: Job) -> Stage:
    made = staged(async_job)
    for shard in range(2):
        raise_generation(made, shard, 0)
    return made


def raise_generation(scene: Stage, shard: int, generation: int) -> None:
    scene.etcd.put(scene.keys.of_shard(shard).generation, msgspec.json.encode(Generation(generation)))


def begin(scene: Stage, index: int) -> Any:
    """A trainer that has begun the job's first pass, and met all shards in their generation 0."""
    trainer = scene.trainer(index)
    shards_at(trainer, 0)
    with pytest.raises(EndOfPass):
        trainer.queue.records.take(TERMS)
    trainer.state.pass_index = trainer.queue.next_pass()
    trainer.queue.begin_pass()
    return trainer


def take(trainer: Any, count: int, terms: ClaimTerms = TERMS) -> list[Any]:
    claims = []
    for _ in range(count):
        (claim,) = trainer.queue.records.take(terms)
        trainer.queue.claims[claim.key] = claim
        claims.append(claim)
    return claims


def discarded(scene: Stage, chunk: int) -> tuple[Discard, ...]:
    kv = scene.etcd.get(scene.keys.discarded(chunk))
    return msgspec.json.decode(kv.value, type=Discards).discards if kv is not None else ()


def test_a_job_that_would_lose_too_much_fails_and_loses_nothing_more(scene: Stage) -> None:
    trainer = begin(scene, 0)
    terms = TERMS._replace(max_discarded=2)
    *_, claim = take(trainer, CHUNKS, terms)
    for batch in range(3):  # of one record each
        trainer.queue.report_failure(claim.key, "it cannot be read", batch)
        state = scene.etcd.get(scene.keys.state)
        assert state is not None
        assert state.value == (b"running" if batch < 2 else b"failed")
        if batch < 2:
            trainer.queue.drop(claim.key)
            (claim,) = take(trainer, 1, terms)
    assert [o.batch for o in discarded(scene, claim.key[1])] == [0, 1]
    assert "3 of 80 records would be discarded, at most 2 may be" in read_events(scene.etcd, scene.keys)[-1][1].text


def test_what_a_shard_forgot_meanwhile_is_not_done(scene: Stage) -> None:
    trainer = begin(scene, 0)
    claims = take(trainer, 1)
    trainer.member.etcd.store.before_txn = lambda: raise_generation(scene, 1, 1)  # at the last moment
    assert trainer.queue.records.complete(claims) == []
    assert trainer.member.etcd.store.before_txn is None
    until(lambda: trainer.member.view.shard_generations[1].number == 1)
    assert trainer.queue.records.complete(claims) == []
    assert "done" not in scene.records()
    shards_at(trainer, 0, generation=1)
    raise_generation(scene, 0, 1)
    until(lambda: trainer.member.view.shard_generations[0].number == 1)
    assert trainer.queue.records.complete(claims) == claims
    assert scene.records()["done"] == {claims[0].key[1]}


def test_what_a_shard_lacks_is_requeued_and_seen_by_those_that_were_through(scene: Stage) -> None:
    trainer = begin(scene, 0)
    trainer.queue.records.complete(take(trainer, CHUNKS))
    with pytest.raises(EndOfPass):
        trainer.queue.records.take(TERMS)
    saved = Ledger()
    for chunk in range(CHUNKS):
        for batch in range(BATCHES - (chunk == 2)):
            saved.add(0, chunk, batch, BATCHES)
    requeue = Requeue(scene.etcd, scene.keys, scene.job.config.plan)
    assert requeue.run(saved) == 1
    assert scene.records() == {"todo": {2}, "done": {0, 1, 3}}
    (claim,) = take(trainer, 1)
    assert claim.key == (0, 2)
    assert requeue.run(saved) == 0, "it is being done"


def ledger_of(chunks: Sequence[Any], last: Any, lacks: set[int]) -> Ledger:
    """All of these chunks, and `last` but for what it lacks."""
    ledger = Ledger()
    for claim in (*chunks, last):
        for batch in set(range(BATCHES)) - (lacks if claim is last else set()):
            ledger.add(*claim.key, batch, BATCHES)
    return ledger


@pytest.mark.parametrize("lacks", [{2}, {1, 2}])
def test_a_chunk_is_requeued_for_what_is_not_discarded(scene: Stage, lacks: set[int]) -> None:
    trainer = begin(scene, 0)
    *rest, last = take(trainer, CHUNKS)
    trainer.queue.report_failure(last.key, "it cannot be read", 2)
    trainer.queue.drop(last.key)
    (again,) = take(trainer, 1)
    trainer.queue.records.complete([*rest, again])
    requeue, ledger = Requeue(scene.etcd, scene.keys, scene.job.config.plan), ledger_of(rest, last, lacks)
    whole = lacks == {2}
    assert requeue.lacking(ledger, 0) == (set() if whole else {last.key[1]})
    assert requeue.run(ledger) == (not whole)
    assert scene.records().get("todo", set()) == (set() if whole else {last.key[1]})


def test_a_claim_that_its_own_trainer_does_not_know_of_is_taken_away(scene: Stage) -> None:
    trainer = begin(scene, 0)

    def fail() -> None:
        raise Ambiguous("no answer")

    trainer.member.etcd.store.after_txn = fail
    (held,) = take(trainer, 1)
    (lost,) = scene.records()["pending"] - {held.key[1]}
    until(lambda: trainer.queue.renew(0.2) or scene.records()["pending"] == {held.key[1]})
    assert lost in scene.records()["todo"]
    assert {c.key[1] for c in take(trainer, CHUNKS - 1)} == set(range(CHUNKS)) - {held.key[1]}


def test_as_many_shards_as_a_job_may_have_fit_into_the_transaction_that_completes_chunks() -> None:
    assert chunk_queue.CLAIM_BATCHES + MAX_ASYNC_PSERVERS <= MAX_TXN_OPS
