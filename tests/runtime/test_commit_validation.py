"""Validations in the commit protocol: opened with their checkpoint, and decided in one history."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from graphft.runtime.checkpoint.manifest import DECIDED, VALIDATE, Manifest
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validating
from graphft.runtime.etcd import Etcd
from graphft.runtime.protocol.decisions import Decided
from tests.runtime.test_commit import Shards


class ValidatedShards(Shards):
    """Every checkpoint is validated; it knows what was decided until then."""

    def commit(self, step: int, generation: int = 0) -> Manifest:
        kv = self.etcd.get(self.keys.decided)
        meta = {VALIDATE: True} | ({DECIDED: msgspec.json.decode(kv.value)} if kv is not None else {})
        made = None
        for commits in self.all:
            part = commits.store.write_part(generation, step, commits.shard, commits.shards, {})
            made = commits.publish(generation, step, part, meta) or made
        assert made is not None
        return made

    def decide(self, step: int, scale: float) -> None:
        self.etcd.delete(self.keys.validating(step))
        self.etcd.put(self.keys.validated(step), b"{}")
        self.etcd.put(self.keys.decided, msgspec.json.encode(Decided(step, scale=scale)))

    @property
    def decided(self) -> Decided:
        kv = self.etcd.get(self.keys.decided)
        return msgspec.json.decode(kv.value, type=Decided) if kv is not None else Decided()

    @property
    def open(self) -> list[int]:
        return [int(kv.key.rsplit("/", 1)[1]) for kv in self.etcd.range(self.keys.all_validating).kvs]


@pytest.fixture
def shards(etcd: Etcd, keys: Keys, tmp_path: Path) -> ValidatedShards:
    shards = ValidatedShards(etcd, keys, tmp_path)
    shards.all[0].ensure_generation()
    return shards


def test_a_commit_opens_the_validation(shards: ValidatedShards) -> None:
    manifest = shards.commit(10)
    assert shards.open == [10]
    kv = shards.etcd.get(shards.keys.validating(10))
    assert kv is not None
    assert msgspec.json.decode(kv.value, type=Validating) == Validating(0, manifest.directory)


def test_what_is_undone_is_opened_again_when_it_is_there_again(shards: ValidatedShards) -> None:
    shards.commit(10)
    shards.decide(10, 0.5)
    shards.damage(shards.commit(20))
    raised = shards.all[0].rollback("it is damaged", below=20)
    assert (raised.step, shards.open, shards.decided.step) == (10, [], 10)
    shards.commit(20, raised.number)
    assert shards.open == [20]


def test_nothing_is_decided_of_a_step_that_everyone_went_back_behind(shards: ValidatedShards) -> None:
    shards.commit(10)
    shards.decide(10, 0.5)
    shards.damage(shards.commit(20))
    shards.decide(20, 0.25)
    shards.all[0].rollback("it is damaged", below=20)
    assert shards.decided == Decided(), "what the checkpoint of step 10 knew: its own validation came after it"
    assert shards.open == [10], "so that is made again, and training waits for what it decides"


@pytest.mark.parametrize("lost", [False, True])
def test_an_etcd_that_is_restored_or_lost_knows_again_what_was_decided(shards: ValidatedShards, lost: bool) -> None:
    shards.commit(10)
    shards.decide(10, 0.5)
    old = [(kv.key, kv.value) for kv in shards.etcd.range(f"/{shards.keys.job}").kvs]
    shards.commit(20)
    shards.decide(20, 0.25)
    shards.commit(30)
    for key in (shards.keys.control, f"/{shards.keys.job}."):
        shards.etcd.delete_prefix(key)
    for key, value in [] if lost else old:
        shards.etcd.put(key, value)
    shards.all[0].ensure_generation()
    shards.all[0].catch_up()
    assert shards.decided == Decided(20, scale=0.25)
    assert shards.open == [30], "what it came to is not known any more"
