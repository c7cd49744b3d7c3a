"""A trainer claims, keeps and gives away slots, on a real etcd; the test plays its main thread."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from graphft.runtime.coordination.records import Barred, Registration
from graphft.runtime.roles.trainer import slot_trainer
from graphft.transpiler.job import Job
from tests.runtime.trainers import Stage, Staged, shards_at
from tests.support.waiting import until


@pytest.fixture
def scene(staged: Staged, job: Job) -> Stage:
    return staged(job).begun()


def claims(trainer: Any) -> set[int]:
    """The slots that the trainer holds in etcd after its daemon thread has looked once."""
    until(
        lambda: trainer.member.watcher.revision >= trainer.member.etcd.get(trainer.member.keys.generation).mod_revision
    )
    seen = trainer.member.etcd.range(trainer.member.keys.control).revision
    until(lambda: trainer.member.watcher.revision >= seen or not trainer.member.watcher.snapshot())
    trainer.claim_slots(trainer.config.trainers, "takeover")
    return {
        int(kv.key.removeprefix(trainer.member.keys.slots))
        for kv in trainer.member.etcd.range(trainer.member.keys.slots).kvs
        if kv.value.decode() == trainer.member.id
    }


def sees(trainer: Any, key: str, there: bool = True) -> None:
    until(lambda: (key in trainer.member.watcher.snapshot()) == there)


def shards_register(scene: Stage, trainer: Any) -> None:
    for shard in range(trainer.config.pservers):
        record = Registration(f"incarnation {shard}", "tcp://127.0.0.1:1", 1, "host")
        scene.etcd.put(scene.keys.pserver(shard), msgspec.json.encode(record))
        sees(trainer, scene.keys.pserver(shard))


def test_a_trainer_claims_when_every_registered_shard_has_welcomed_it(scene: Stage) -> None:
    trainer = scene.trainer(0)
    shards_register(scene, trainer)
    assert claims(trainer) == set()
    shards_at(trainer, 0)
    assert claims(trainer) == set(range(trainer.config.trainers))


def test_a_trainer_whose_main_thread_is_stuck_claims_nothing(scene: Stage) -> None:
    trainer = scene.trainer(0)
    trainer.member.progress.begin("computing")
    trainer.member.progress.limit = 1.0
    trainer.member.progress.last = time.monotonic() - 2.0
    assert claims(trainer) == set()
    trainer.member.progress.limit = 1e6  # what follows may take long
    trainer.member.progress.beat()
    assert claims(trainer) == set(range(trainer.config.trainers))
    lost = trainer.member.keys.slot(0)
    sees(trainer, lost)
    trainer.view.take_in()  # it knows that it holds the slot, before it loses it
    scene.etcd.delete(lost)
    sees(trainer, lost, there=False)
    trainer.view.take_in()
    assert 0 not in claims(trainer), "no mark since it was lost"
    trainer.member.progress.beat()
    assert 0 in claims(trainer)


def test_a_claim_that_a_restored_etcd_has_lost_is_made_again(scene: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_trainer, "LATE_SECONDS", 0.2)
    trainer = scene.trainer(0)
    shards_register(scene, trainer)
    shards_at(trainer, 0)
    everything = set(range(trainer.config.trainers))
    assert claims(trainer) == everything
    trainer._claimed_at += 1000  # as of a history that is no more
    for slot in everything:
        scene.etcd.delete(scene.keys.slot(slot))
        sees(trainer, scene.keys.slot(slot), there=False)
    until(lambda: claims(trainer) == everything)


def test_a_trainer_that_is_barred_leaves_the_slots_to_others(scene: Stage) -> None:
    trainer, other = scene.trainer(0), scene.trainer(1)
    until(lambda: len(trainer.member.view.trainers) == 2 == len(other.member.view.trainers))
    key = scene.keys.barred(trainer.member.id)
    scene.etcd.put(key, msgspec.json.encode(Barred("a test says so", "a test")), trainer.member.lease)
    for one in (trainer, other):
        sees(one, key)
    assert claims(trainer) == set()
    assert trainer.quarantine.sidelined()
    assert claims(other) == set(range(other.config.trainers)), "all of them are its share"
    scene.etcd.put(
        scene.keys.barred(other.member.id), msgspec.json.encode(Barred("the same", "a test")), other.member.lease
    )
    sees(other, scene.keys.barred(other.member.id))
    assert not other.quarantine.sidelined()


def test_a_slot_that_is_given_away_and_claimed_again_between_two_looks(scene: Stage) -> None:
    trainer = scene.trainer(0)
    shards_at(trainer, 0)
    trainer.view.take_in()
    held = claims(trainer)
    until(lambda: trainer.member.view.slots.keys() == held)
    trainer.view.take_in()
    trainer.comm.take_in(0)
    assert trainer.shards.slots() == sorted(held)
    watched = trainer.member.watcher.snapshot()[scene.keys.slot(0)].create_revision
    trainer.hand_over(0)
    assert 0 not in trainer.shards.slots(), "at once"
    trainer.member.progress.beat()
    scene.etcd.put(scene.keys.slot(0), trainer.member.id.encode(), trainer.member.lease)
    until(lambda: trainer.member.view.claims.get(0, 0) > watched)
    trainer.view.take_in()
    trainer.comm.take_in(0)
    assert trainer.shards.slots() == sorted(held)
    assert trainer.shards.claim_of(0) == trainer.member.view.claims[0]
