"""The saver: parts in the background, the commit, the model at the end; etcd or the disk may fail meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import Tensor

from graphft.ir import Kind
from graphft.runtime.checkpoint import writer
from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.checkpoint.writer import Saver, Snapshot
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Committed, Generation, Validated, decode
from graphft.runtime.coordination.result_files import read_validations
from graphft.runtime.etcd import Etcd
from graphft.transpiler.job import Job
from tests.runtime.stubs import kinds
from tests.support.waiting import until

STEPS = 4


def state_of(job: Job, shard: int) -> dict[str, Tensor]:
    program = job.pserver_program(shard)
    return {v.name: program.values[v.name] for v in program.of_kind(Kind.PARAM, Kind.BUFFER, Kind.STATE)}


class Savers:
    """The savers of both shards of the job, on one folder."""

    def __init__(self, job: Job, etcd: Etcd, keys: Keys, folder: Path) -> None:
        self.job, self.etcd, self.keys, self.folder = job, etcd, keys, folder
        store = CheckpointStore(folder / "checkpoints")
        self.commits = [Commits(etcd, keys, store, i, 2, job.hash, f"p{i}") for i in range(2)]
        self.commits[0].ensure_generation()
        etcd.put(keys.state, b"running")
        self.all = [Saver(c, Events(etcd, keys, f"pserver {c.shard}"), job, folder, lambda: None) for c in self.commits]

    def submit(self, step: int, generation: int = 0, keep: int = 2) -> None:
        for shard, saver in enumerate(self.all):
            saver.submit(Snapshot(generation, step, state_of(self.job, shard), keep, f"ledger {shard}"))

    @property
    def committed(self) -> Committed | None:
        return decode(self.etcd.get(self.keys.committed), Committed)

    def commit(self, step: int, generation: int = 0) -> Committed:
        """Returns when the shard that commits it knows of it, too: that comes after the record in etcd."""
        self.submit(step, generation)
        until(lambda: self.committed is not None and self.committed.step == step)
        committed = self.committed
        assert committed is not None
        until(lambda: any(saver.committed_in(committed.generation) == committed for saver in self.all))
        return committed

    @property
    def state(self) -> bytes:
        kv = self.etcd.get(self.keys.state)
        assert kv is not None
        return kv.value

    def close(self) -> None:
        for saver in self.all:
            saver.close()


@pytest.fixture
def savers(job: Job, etcd: Etcd, keys: Keys, tmp_path: Path) -> Iterator[Savers]:
    savers = Savers(job, etcd, keys, tmp_path)
    yield savers
    savers.close()


def test_checkpoints_are_committed_in_order_and_pruned(savers: Savers) -> None:
    for step in (1, 2, 3):
        savers.submit(step)
    until(lambda: savers.committed == Committed(0, 3, "step-00000003.g0"))
    store = savers.commits[0].store
    until(lambda: [m.step for m in store.manifests()] == [3, 2])
    until(lambda: not savers.etcd.count(savers.keys.all_parts))
    tensors, ledger = store.read_part(store.manifests()[0], 1)
    assert ledger == "ledger 1"
    wanted = state_of(savers.job, 1)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[n], v) for n, v in wanted.items())


def test_records_are_closed_before_the_job_is_called_complete(savers: Savers) -> None:
    states = []
    savers.all[0]._close_records = lambda: states.append(savers.state)
    savers.all[0].finish(savers.commit(4))
    until(lambda: savers.state == b"complete")
    until(lambda: states == [b"running", b"complete"])  # and after it: etcd may have been restored in between


def test_a_job_that_failed_meanwhile_is_not_complete(savers: Savers) -> None:
    final = savers.commit(STEPS)
    savers.etcd.put(savers.keys.state, b"failed")
    savers.all[0].finish(final)
    until((savers.folder / "model.safetensors").exists)
    savers.close()
    assert (savers.state, kinds(savers.etcd, savers.keys)) == (b"failed", [])


def test_a_final_checkpoint_that_cannot_be_read_is_made_again(savers: Savers) -> None:
    savers.commit(2)
    final = savers.commit(STEPS)
    (path,) = Path(savers.commits[0].store.root, final.checkpoint).glob("shard-1-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)
    savers.all[0].finish(final)
    until(lambda: savers.committed == Committed(0, 2, "step-00000002.g0"))
    savers.all[0].finish(final)  # by a loop whose view is behind: nobody is sent back once more
    final = savers.commit(STEPS, generation=1)
    until(lambda: savers.all[0].finish(final) or savers.state == b"complete")
    told = ["damaged-checkpoint", "complete"]
    until(lambda: kinds(savers.etcd, savers.keys) == told)  # the event comes after the state
    generation = decode(savers.etcd.get(savers.keys.generation), Generation)
    assert generation is not None
    assert (generation.number, generation.step) == (1, 2)


def test_a_part_that_a_restored_etcd_does_not_know_is_recorded_again(
    savers: Savers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PUBLISH_SECONDS", 0.1)
    one, other = savers.all
    one.submit(Snapshot(0, 20, state_of(savers.job, 0), 2))
    key = f"{savers.keys.parts(0, 20)}0"
    until(lambda: savers.etcd.get(key) is not None)
    savers.etcd.delete(key)
    other.submit(Snapshot(0, 20, state_of(savers.job, 1), 2))

    def looked_after() -> bool:
        for saver in (one, other):
            saver.look_after_part(0, savers.committed)
        return savers.committed is not None

    until(looked_after)
    assert savers.committed is not None
    assert savers.committed.step == 20
    one.look_after_part(0, savers.committed)
    assert not one.counters


def test_what_the_thread_dies_of_is_raised_in_the_loop(savers: Savers) -> None:
    (savers.folder / "checkpoints").write_text("a file where a folder should be")
    saver = savers.all[0]
    saver.check()
    saver.submit(Snapshot(0, 1, state_of(savers.job, 0), 2))

    def failed() -> bool:
        try:
            saver.check()
        except OSError:
            return True
        return False

    until(failed)


def test_validations_are_in_the_folder_before_the_model_is(savers: Savers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says that the job is complete: a launcher that is killed then has taken only some of them."""
    for step in (2, 4):
        one = Validated(step, 1, 8, {"loss": 0.5}, 0.0)
        savers.etcd.put(savers.keys.validated(step), msgspec.json.encode(one))
    config = savers.job.config.replace(validate=Mock())
    savers.all[0].job = dataclasses.replace(savers.job, config=config)
    seen: list[set[int]] = []
    monkeypatch.setattr(writer, "write_tensors", lambda *args: seen.append(set(read_validations(savers.folder))))
    savers.all[0].finish(savers.commit(STEPS))
    until(lambda: seen == [{2, 4}])
    until(lambda: savers.state == b"complete")
