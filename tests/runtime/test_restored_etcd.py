"""An etcd that is restored from a backup knows less than the disk: the job goes on from the disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.manifest import Manifest, recorded
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Committed, Generation, decode
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import put_op
from graphft.runtime.protocol.chunk_queue import Discard, Discards
from tests.sim.etcd_store import SimEtcd

SHARDS = 2
KEYS = Keys("job")


class CrashError(Exception):
    """The process that would have committed ends instead."""


class Cluster:
    """The shards of a job, on one etcd that can be backed up and restored, and one disk that cannot.

    Every part that is written has contents of its own, as in async mode: so a folder that is written by two histories
    shows.
    """

    def __init__(self, root: Path) -> None:
        self.etcd, self.store, self.count = SimEtcd(), CheckpointStore(root), 0
        self.shards = [Commits(self.etcd, KEYS, self.store, i, SHARDS, "program", f"p{i}") for i in range(SHARDS)]
        self.start()

    def start(self) -> list[bool]:
        """All shards begin, as their processes do. Returns which found that etcd is behind."""
        found = []
        for shard in self.shards:
            shard.ensure_generation()
            found.append(shard.catch_up() is not None)
            _, restarted = shard.begin()
            if restarted and not found[-1]:
                shard.rollback("restarted")
        return found

    @property
    def generation(self) -> Generation:
        generation = decode(self.etcd.get(KEYS.generation), Generation)
        assert generation is not None
        return generation

    @property
    def committed(self) -> Committed | None:
        return decode(self.etcd.get(KEYS.committed), Committed)

    def write(self, step: int, parts: int = SHARDS, commit: bool = True) -> None:
        """Shards write their parts of `step`; the last one commits, or ends between manifest and commit."""
        generation = self.generation.number
        assert not any(p.exists() for p in self.files(generation, step)), "another history has written these files"
        for shard in self.shards[:parts]:
            self.count += 1
            part = self.store.write_part(generation, step, shard.shard, SHARDS, {"n": torch.tensor(self.count)})
            last = shard.shard == SHARDS - 1 and not commit
            etcd: Any = Crashing(self.etcd) if last else self.etcd
            writer = Commits(etcd, KEYS, self.store, shard.shard, SHARDS, "program", shard.process)
            try:
                writer.publish(generation, step, part)
            except CrashError:
                assert last

    def files(self, generation: int, step: int) -> list[Path]:
        return list(Path(self.store.root, f"step-{step:08d}.g{generation}").glob("*.safetensors"))

    def backup(self) -> dict[str, bytes]:
        return {kv.key: kv.value for kv in self.etcd.range("").kvs}

    def restore(self, backup: dict[str, bytes]) -> None:
        self.etcd.delete_prefix("/")
        self.etcd.txn([], [put_op(key, value) for key, value in backup.items()])

    def newest(self) -> Manifest | None:
        return max(self.store.manifests(), key=lambda m: (m.generation, m.step), default=None)


class Crashing:
    """An etcd that takes the record of a part, but not the commit behind it."""

    def __init__(self, etcd: SimEtcd) -> None:
        self.etcd = etcd

    def txn(self, compare: Any, success: Any, *args: Any, **kwargs: Any) -> Any:
        if any(op.kind == "put" and op.key == KEYS.committed for op in success):
            raise CrashError
        return self.etcd.txn(compare, success, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.etcd, name)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "checkpoints")


def test_a_later_history_counts_more_than_a_later_step(cluster: Cluster) -> None:
    cluster.write(50)
    cluster.write(100)
    early = cluster.backup()
    cluster.shards[0].rollback("damaged", below=100)
    cluster.write(75)
    cluster.restore(early)
    assert cluster.start() == [True, False]
    assert cluster.committed == Committed(1, 75, "step-00000075.g1")
    assert cluster.generation.step == 75


def test_what_etcd_knows_is_not_overruled(cluster: Cluster) -> None:
    cluster.write(50)
    cluster.write(100, commit=False)
    raised = Generation(1, 50, "step-00000050.g0", "chunk 3 is poison")  # as a trainer does it
    cluster.etcd.put(KEYS.generation, msgspec.json.encode(raised))
    assert cluster.generation == raised
    assert cluster.start() == [False, False]
    assert cluster.committed == Committed(0, 50, "step-00000050.g0")
    assert cluster.generation.step == 50


def test_processes_that_live_on_overtake_an_etcd_that_is_restored(cluster: Cluster) -> None:
    early = cluster.backup()
    for _ in range(2):
        cluster.shards[0].rollback("restarted")
    cluster.write(50)
    generation = cluster.generation.number
    assert cluster.shards[0].overtake(generation) is None, "a view that is behind changes nothing"
    cluster.restore(early)
    raised = cluster.shards[0].overtake(generation)
    assert raised is not None
    assert (raised.number, raised.step) == (3, 50)
    assert cluster.shards[1].overtake(generation) is None
    cluster.restore(early)
    for path in Path(cluster.store.root).iterdir():  # nothing on the disk tells, but the process itself
        path.rename(path.with_name("elsewhere"))
    raised = cluster.shards[0].overtake(generation)
    assert raised is not None
    assert (raised.number, raised.step) == (3, 0)


def test_a_commit_that_a_restored_etcd_does_not_know_is_made_good(cluster: Cluster) -> None:
    cluster.write(50)
    backup = cluster.backup()
    cluster.write(100)
    mine = cluster.committed
    assert cluster.shards[1].overtake(0, mine) is None, "etcd knows it"
    cluster.restore(backup)
    raised = cluster.shards[1].overtake(0, mine)
    assert raised is not None
    assert (raised.number, raised.step) == (1, 100)
    assert cluster.committed == mine
    assert cluster.shards[0].overtake(0, mine) is None, "the generation is another one now"


def discard(batch: int) -> Discard:
    return Discard(0, batch, f"record {batch} is damaged", 3, records=(batch,))


def leave_out(etcd: SimEtcd, chunk: int, *batches: int) -> None:
    record = Discards(tuple(map(discard, batches)))
    etcd.put(KEYS.discarded(chunk), msgspec.json.encode(record))


def discarded(etcd: SimEtcd) -> dict[int, list[int]]:
    return {chunk: [o.batch for o in found.discards] for chunk, found in read_discards(etcd, KEYS).items()}


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_discarded_is_known_again(cluster: Cluster, lost: bool) -> None:
    leave_out(cluster.etcd, 4, 1)
    early = cluster.backup()
    leave_out(cluster.etcd, 4, 1, 5)
    leave_out(cluster.etcd, 7, 2)
    wanted = read_discards(cluster.etcd, KEYS)
    for shard in cluster.shards:  # a checkpoint with what is discarded, as a saver writes it
        part = cluster.store.write_part(0, 50, shard.shard, SHARDS, {"n": torch.ones(1)})
        shard.publish(0, 50, part, recorded(cluster.etcd, KEYS))
    cluster.restore({} if lost else early)
    if lost:
        made = cluster.shards[0].ensure_generation()
        assert made is not None
        assert made.step == 50, "for the event that tells"
        assert cluster.shards[0].ensure_generation() is None
        assert read_discards(cluster.etcd, KEYS) == wanted, "reasons, records and all"
    leave_out(cluster.etcd, 4, 1, *[5] * lost, 9)  # found since, by processes that live on
    assert cluster.start() == [not lost, False]
    assert discarded(cluster.etcd) == ({4: [1, 5, 9], 7: [2]})
    before = cluster.backup()
    cluster.shards[0].rollback("restarted")
    assert {k: v for k, v in cluster.backup().items() if KEYS.all_discarded in k} == {
        k: v for k, v in before.items() if KEYS.all_discarded in k
    }, "what is known is not written again"


@pytest.mark.parametrize("seed", range(20))
def test_no_progress_is_lost_and_no_file_written_twice(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(tmp_path / "checkpoints")
    backups, step = [cluster.backup()], 0
    for _ in range(25):
        action = rng.choice(("whole", "whole", "crash", "part", "rollback", "backup", "restore"))
        step += rng.randint(1, 3)
        if action in ("whole", "part"):
            cluster.write(step, parts=SHARDS if action == "whole" else 1)
        elif action == "rollback":
            step = rng.choice(cluster.shards).rollback("restarted").step
        elif action == "backup":
            backups.append(cluster.backup())
        else:
            if action == "crash":
                cluster.write(step, commit=False)
            committed, newest = cluster.committed, cluster.newest()
            cluster.restore(rng.choice(backups) if action == "restore" else cluster.backup())
            cluster.start()
            step = cluster.generation.step
            assert step >= (committed.step if committed is not None else 0), "what was committed is not lost"
            assert (newest is None) == (cluster.committed is None)
            assert newest is None or action == "crash" or step == newest.step
            assert cluster.generation.number > cluster.store.latest_generation()
        if cluster.committed is not None:
            manifest = cluster.store.read_manifest(cluster.committed.checkpoint)
            assert [cluster.store.read_part(manifest, i)[0]["n"].dim() for i in range(SHARDS)] == [0, 0]
