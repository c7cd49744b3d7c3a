"""Index 0 is an index, a job's records outlive its processes, a shard that is away moves no other's connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from graphft.errors import UsageError
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.records import Committed, Registration
from graphft.runtime.coordination.revoker import Revoker
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.process.identity import Identity
from graphft.runtime.protocol.events import Received, SyncOptions
from graphft.runtime.protocol.messages import Hello, Pull
from graphft.runtime.protocol.sync_shard import SyncShard
from graphft.runtime.roles.environment import RoleSpec, make_role
from graphft.transpiler.job import Job
from tests.runtime.trainers import Stage, Staged
from tests.support.patient import Patient
from tests.support.programs_by_hand import linear_job
from tests.support.waiting import until


@pytest.mark.parametrize("sync", [True, False])
def test_without_fault_tolerance_each_trainer_has_an_index(sync: bool, tmp_path: Path) -> None:
    etcd: Any = None  # it is not asked
    with pytest.raises(UsageError, match="there is no trainer -1"):
        make_role(linear_job(sync=sync, ft=False), tmp_path, RoleSpec("trainer"), etcd)


@pytest.fixture(scope="module")
def wide_job() -> Job:
    """Three pservers."""
    return linear_job(pservers=3, trainers=1)


@pytest.fixture
def scene(staged: Staged, wide_job: Job) -> Stage:
    return staged(wide_job)


def make(scene: Stage, spec: RoleSpec) -> Any:
    role = make_role(scene.job, scene.folder, spec, Patient(scene.server.endpoints))
    assert role is not None
    scene.stack.callback(role.transport.close)
    scene.stack.callback(role.close)
    scene.stack.callback(role.server.saver.close if role.kind == "pserver" else role.prefetcher.close)
    return role


def test_a_sync_shard_forgets_a_trainer_that_is_gone(scene: Stage) -> None:
    role, trainers = make(scene, RoleSpec("pserver", 0)), [scene.trainer(0), scene.trainer(1)]
    member, shard = role.member, role.server
    shard.machine = SyncShard(
        SyncOptions(shard=0, shards=3, slots=1, buckets=(0,), total_steps=8, run=member.keys.job),
        incarnation=member.id,
        generation=0,
        version=0,
    )
    gone, stays = (t.member.id for t in trainers)
    until(lambda: {gone, stays} <= member.view.trainers.keys())
    shard.follow()
    for peer in (f"{gone}#1", f"{gone}#2", f"{stays}#1", "shard-1#1"):
        shard.step(Received(peer, Hello(member.keys.job, peer.rsplit("#")[0]), None))
        shard.step(Received(peer, Pull(0, 1, 0), None))
    scene.etcd.delete(scene.keys.trainer(gone))
    until(lambda: gone not in member.view.trainers)
    shard.follow()
    assert set(shard.machine.peers) == {f"{stays}#1", "shard-1#1"}
    assert [peer for peer, _ in shard.machine.waiting] == [f"{stays}#1", "shard-1#1"]


# -- indices ----------------------------------------------------------------------------------------------------------


def test_pserver_0_is_pserver_0(scene: Stage) -> None:
    first = make(scene, RoleSpec("pserver", 0))
    first.session.register(role="pserver", index=0, lease=True)
    again, any_ = make(scene, RoleSpec("pserver", 0)), make(scene, RoleSpec("pserver"))
    assert [(r.kind, r.member.index, r.program.attrs["index"]) for r in (first, again, any_)] == [
        ("pserver", 0, 0),
        ("pserver", 0, 0),
        ("pserver", 1, 1),
    ]


def test_the_launcher_tells_pserver_0_from_trainer_0(scene: Stage) -> None:
    keys = {"pserver": scene.keys.pserver(0), "trainer": scene.keys.trainer("0-a")}
    for pid, (role, key) in enumerate(keys.items(), start=1):
        record = Registration(f"0-{role}", "", pid, "here", process=Identity("m", "n", pid, 5))
        scene.etcd.put(key, msgspec.json.encode(record), scene.etcd.lease_grant(600)[0])
    assert Revoker(scene.etcd, scene.keys).try_once(Identity("m", "n", 2, 5))
    assert (scene.etcd.get(keys["pserver"]) is not None, scene.etcd.get(keys["trainer"])) == (True, None)


# -- what hangs on whose lease ----------------------------------------------------------------------------------------


def test_the_number_of_pservers_outlives_them(scene: Stage) -> None:
    put_job(scene.etcd, scene.keys, scene.job)
    before = {kv.key for kv in scene.etcd.range(scene.keys.control).kvs}
    pservers = [make(scene, RoleSpec("pserver", index)) for index in range(2)]
    for pserver in pservers:
        pserver.session.register(role="pserver", index=pserver.member.index, lease=True)
        pserver.server.commits.begin()
    for pserver in pservers:
        scene.etcd.lease_revoke(pserver.member.lease)
    left = {kv.key: kv for kv in scene.etcd.range(scene.keys.control).kvs}
    assert left[scene.keys.ps_desired].value == b"3"
    assert before <= left.keys()
    assert {scene.keys.generation, scene.keys.started(0), scene.keys.started(1)} <= left.keys()
    assert not any(key.startswith(scene.keys.pservers) for key in left)
    assert not any(kv.lease for kv in left.values())


# -- connections ------------------------------------------------------------------------------------------------------


def test_a_shard_that_finds_an_older_checkpoint_than_was_committed_says_so(scene: Stage) -> None:
    recovery = make(scene, RoleSpec("pserver", 0)).server.recovery
    commits, store = recovery.commits, recovery.commits.store
    commits.begin()
    parts = [store.write_part(0, 200, i, 3, {"w": torch.zeros(2)}) for i in range(3)]
    store.write_manifest(Manifest(0, 200, commits.run, tuple(parts)))
    scene.etcd.put(scene.keys.committed, msgspec.json.encode(Committed(0, 600, "step-00000600.g0")))
    recovery.join()
    assert (recovery.generation.number, recovery.generation.step) == (1, 200)
    (told,) = [event for _, event in read_events(scene.etcd, scene.keys) if event.kind == "damaged-checkpoint"]
    assert "the checkpoint of step 600, which was committed, is not in" in told.text
    assert "going back to step 200" in told.text
