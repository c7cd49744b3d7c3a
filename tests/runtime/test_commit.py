"""The checkpoint that counts is committed once, never across a rollback, and never one that cannot be read."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Asked, Committed, Generation, decode
from graphft.runtime.etcd import Etcd
from tests.runtime.trainers import Interposed

PROGRAM = "0123456789abcdef"


class Shards:
    """The commit protocol of several shards of one job, on one real etcd and one folder."""

    def __init__(self, etcd: Etcd, keys: Keys, root: Path, shards: int = 3) -> None:
        self.etcd, self.keys, self.store = etcd, keys, CheckpointStore(root)
        self.all = [self.shard(i, shards) for i in range(shards)]

    def shard(self, index: int, shards: int = 3, etcd: Any = None, program: str = PROGRAM) -> Commits:
        return Commits(etcd or self.etcd, self.keys, self.store, index, shards, program, f"process-{index}")

    def publish(self, commits: Commits, generation: int, step: int) -> Manifest | None:
        value = {"w": torch.full((4,), float(step))}
        part = commits.store.write_part(generation, step, commits.shard, commits.shards, value)
        return commits.publish(generation, step, part)

    def commit(self, step: int, generation: int = 0) -> Manifest:
        """All shards publish, and the checkpoint is committed."""
        (manifest,) = [m for c in self.all if (m := self.publish(c, generation, step)) is not None]
        return manifest

    @property
    def committed(self) -> Committed | None:
        return decode(self.etcd.get(self.keys.committed), Committed)

    @property
    def generation(self) -> Generation | None:
        return decode(self.etcd.get(self.keys.generation), Generation)

    def damage(self, manifest: Manifest, shard: int = 1) -> None:
        os.truncate(Path(self.store.root) / manifest.parts[shard].file, 5)


@pytest.fixture
def shards(etcd: Etcd, keys: Keys, tmp_path: Path) -> Shards:
    shards = Shards(etcd, keys, tmp_path)
    shards.all[0].ensure_generation()
    return shards


# -- asking -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_asked_for_once_though_all_shards_find_it_due(shards: Shards) -> None:
    wanted = [Asked(0, 10 + c.shard) for c in shards.all]
    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(lambda c, asked: c.ask(asked, None), shards.all, wanted))
    assert won.count(True) == 1
    asked = wanted[won.index(True)]
    assert decode(shards.etcd.get(shards.keys.checkpoint_at), Asked) == asked
    assert not shards.all[0].ask(Asked(0, 90), None), "somebody has asked since"
    assert shards.all[0].ask(Asked(0, 90), asked)


def test_nothing_is_asked_for_in_a_generation_that_is_over(shards: Shards) -> None:
    slow = Interposed(shards.etcd)
    slow.before_txn = lambda: shards.all[0].rollback("somebody else died")
    assert not shards.shard(2, etcd=slow).ask(Asked(0, 10), None)
    assert not shards.all[1].ask(Asked(0, 10), None)
    assert shards.etcd.get(shards.keys.checkpoint_at) is None
    assert shards.all[1].ask(Asked(1, 10), None)


# -- committing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_part_commits_whatever_the_order(shards: Shards, order: tuple[int, ...]) -> None:
    results = [shards.publish(shards.all[i], 0, 50) for i in order]
    assert results[:2] == [None, None]
    assert results[2] is not None
    assert [p.shard for p in results[2].parts] == [0, 1, 2]
    assert shards.committed == Committed(0, 50, "step-00000050.g0")
    assert shards.store.manifests() == [results[2]]


def test_a_checkpoint_takes_a_transaction_per_part_and_one_more(shards: Shards) -> None:
    asked: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(shards.etcd, name)

    counted = [shards.shard(i, etcd=Counting()) for i in range(3)]
    for step in (50, 100):
        asked.clear()
        assert [shards.publish(c, 0, step) is not None for c in counted] == [False, False, True]
    assert asked == ["txn"] * 4
    assert shards.etcd.count(shards.keys.all_parts) == 0


def test_an_older_step_is_never_committed_over_a_newer_one(shards: Shards) -> None:
    shards.commit(100)
    assert [shards.publish(c, 0, 50) for c in shards.all] == [None, None, None]
    assert shards.committed == Committed(0, 100, "step-00000100.g0")


def test_the_manifest_is_written_before_the_commit(shards: Shards) -> None:
    etcd = Interposed(shards.etcd)
    last = shards.shard(2, etcd=etcd)
    seen: list[tuple[Committed | None, list[int]]] = []

    def look() -> None:
        etcd.before_txn = lambda: seen.append((shards.committed, [m.step for m in shards.store.manifests()]))

    first = shards.commit(50)
    for c in shards.all[:2]:
        shards.publish(c, 0, 100)
    etcd.after_txn = look  # behind the part's transaction, before the commit's
    shards.publish(last, 0, 100)
    assert seen == [(Committed(0, 50, first.directory), [100, 50])]


def test_parts_are_forgotten_with_the_void_ones(shards: Shards) -> None:
    shards.publish(shards.all[0], 0, 25)
    shards.all[1].rollback("shard 1 was restarted")
    for c in shards.all[:2]:
        shards.publish(c, 1, 25)
    shards.publish(shards.all[0], 1, 50)
    assert shards.publish(shards.all[2], 1, 25) is not None
    left = [kv.key for kv in shards.etcd.range(shards.keys.all_parts).kvs]
    assert left == [f"{shards.keys.parts(1, 50)}0"]
    assert [shards.publish(c, 1, 50) is not None for c in shards.all[1:]] == [False, True]


# -- generations --------------------------------------------------------------------------------------------------


def test_a_part_of_an_older_generation_is_void(shards: Shards) -> None:
    shards.publish(shards.all[0], 0, 50)
    assert shards.all[1].rollback("shard 1 was restarted").number == 1
    assert [shards.publish(c, 0, 50) for c in shards.all] == [None, None, None]
    assert shards.committed is None
    assert shards.commit(50, generation=1).generation == 1


def test_a_commit_begun_before_a_rollback_is_not_made_after_it(shards: Shards) -> None:
    shards.commit(50)
    etcd = Interposed(shards.etcd)
    last = shards.shard(2, etcd=etcd)
    for c in shards.all[:2]:
        shards.publish(c, 0, 100)
    # behind the transaction that records the part, before the manifest is written
    etcd.after_txn = lambda: shards.all[0].rollback("shard 0 was restarted")
    assert shards.publish(last, 0, 100) is None
    assert shards.committed == Committed(0, 50, "step-00000050.g0")
    assert shards.generation == Generation(1, 50, "step-00000050.g0", "shard 0 was restarted")
    assert [m.step for m in shards.store.manifests()] == [100, 50]
    assert shards.all[1].rollback("shard 1 was restarted").step == 50, "of generation 0: void"
    assert shards.commit(100, generation=2).directory == "step-00000100.g2"


def test_a_rollback_takes_a_checkpoint_that_is_whole_though_its_commit_was_not_made(shards: Shards) -> None:
    shards.commit(50)
    etcd = Interposed(shards.etcd)
    last = shards.shard(2, etcd=etcd)
    for c in shards.all[:2]:
        shards.publish(c, 0, 100)

    def then_roll_back() -> None:  # behind the transaction that records the part, before the one that commits
        etcd.before_txn = lambda: shards.all[0].rollback("shard 2 was restarted")

    etcd.after_txn = then_roll_back
    assert shards.publish(last, 0, 100) is None
    assert shards.committed == Committed(0, 100, "step-00000100.g0")
    assert shards.generation == Generation(1, 100, "step-00000100.g0", "shard 2 was restarted")


def test_a_rollback_takes_a_commit_that_was_made_meanwhile(shards: Shards) -> None:
    shards.commit(50)
    etcd = Interposed(shards.etcd)
    etcd.before_txn = lambda: shards.commit(100)
    assert shards.shard(0, etcd=etcd).rollback("late") == Generation(1, 100, "step-00000100.g0", "late")


def test_rollbacks_by_two_shards_at_once_are_one(shards: Shards) -> None:
    shards.commit(50)
    etcd = Interposed(shards.etcd)
    etcd.before_txn = lambda: shards.all[1].rollback("shard 1 was restarted")
    assert shards.shard(0, etcd=etcd).rollback("shard 0 was restarted") == Generation(
        1, 50, "step-00000050.g0", "shard 1 was restarted"
    )
    assert shards.generation == Generation(1, 50, "step-00000050.g0", "shard 1 was restarted")


# -- going back past what is damaged --------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_passed_over(shards: Shards) -> None:
    first, second = shards.commit(50), shards.commit(100)
    shards.damage(second)
    generation = shards.all[0].rollback("restarted")
    assert generation == Generation(1, 50, first.directory, "restarted")
    assert shards.committed == Committed(0, 50, first.directory)
    assert shards.commit(100, generation=1).directory == "step-00000100.g1", "the step is committed once more"


def test_rollback_below_a_part_that_cannot_be_read(shards: Shards) -> None:
    manifests = [shards.commit(step) for step in (50, 100, 150)]
    generation = shards.all[0].rollback("damaged", below=150)
    assert (generation.number, generation.step) == (1, 100)
    assert shards.all[0].rollback("damaged", below=100).checkpoint == manifests[0].directory
    generation = shards.all[0].rollback("damaged", below=50)
    assert generation == Generation(3, 0, "", "damaged")


def test_without_any_usable_checkpoint_the_job_starts_over_and_commits_again(shards: Shards) -> None:
    shards.damage(shards.commit(50))
    shards.damage(shards.commit(100))
    assert shards.all[0].rollback("restarted") == Generation(1, 0, "", "restarted")
    assert shards.committed is None
    shards.commit(50, generation=1)
    assert shards.committed == Committed(1, 50, "step-00000050.g1")


def test_checkpoints_of_another_run_are_not_gone_back_to(shards: Shards) -> None:
    foreign = [shards.store.write_part(0, 25, i, 3, {"w": torch.ones(1)}) for i in range(3)]
    shards.store.write_manifest(Manifest(0, 25, "another run", tuple(foreign)))
    shards.damage(shards.commit(50))
    assert shards.all[0].rollback("restarted").step == 0
    with pytest.raises(GraphftError, match="of run another run, this is"):
        shards.all[0].manifest_of(Generation(1, 25, "step-00000025.g0"))


# -- starting -----------------------------------------------------------------------------------------------------


def test_begin_tells_a_first_start_from_a_restart(etcd: Etcd, keys: Keys, tmp_path: Path) -> None:
    shards = Shards(etcd, keys, tmp_path)
    assert shards.all[0].begin() == (Generation(reason="start"), False)
    assert shards.all[1].begin() == (Generation(reason="start"), False)
    generation, restarted = Commits(etcd, keys, shards.store, 0, 3, PROGRAM, "process-0-again").begin()
    assert (generation.step, restarted) == (0, True)
    assert shards.all[2].begin() == (Generation(reason="start"), False)


def test_a_new_etcd_goes_on_from_the_checkpoint_on_disk(shards: Shards) -> None:
    newest = [shards.commit(step) for step in (50, 100)][-1]
    shards.store.write_part(7, 125, 0, 3, {"w": torch.ones(1)})  # of a generation that did not get far
    shards.etcd.delete_prefix(f"/{shards.keys.job}")
    for c in reversed(shards.all):
        generation, restarted = c.begin()
        assert (generation.number, generation.step, generation.checkpoint) == (8, 100, newest.directory)
        assert not restarted
    assert shards.committed == Committed(0, 100, newest.directory)
    assert shards.commit(150, generation=8).step == 150
