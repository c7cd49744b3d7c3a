"""Whole jobs whose etcd is full, or whose data is away for a while: the same bits, and nothing is discarded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from etcd.servers import cure, fill, full_etcd

import graphft
from graphft import ir
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import Etcd
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, at, kill, play

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_a_job_waits_for_an_etcd_that_is_full(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played, workplace: Path
) -> None:
    """A shard that dies meanwhile comes back when etcd takes records again."""
    with full_etcd(workplace / "full etcd") as server, Etcd(server.endpoints) as etcd:

        def be_full(supervisor: Any) -> None:
            fill(etcd)
            assert kill("pserver", 1)(supervisor)

        def be_cured(supervisor: Any) -> None:
            end = time.monotonic() + 3
            while time.monotonic() < end:  # no act, but a while: what lives must go on living
                supervisor.step(0.1)
            cure(etcd)

        acts = [
            Act(at(12), be_full),
            Act(lambda status: status.etcd_full, be_cured),
            Act(lambda status: not status.etcd_full, lambda _: pace.set(0)),
        ]
        job = training.job(program, pace=pace.file, lease_ttl=60)
        played = play(job, folder, acts, etcd=",".join(server.endpoints))
    assert_same_bits(played.state, undisturbed.state)
    assert played.result.failures == {}
    assert set(played.result.preemptions) == {"pserver 1"}


def waiting(status: JobStatus) -> bool:
    return any("waiting for storage: FileNotFoundError" in t.get("waiting", "") for t in status.trainers.values())


def test_an_outage_discards_nothing(program: ir.Program, folder: Path, pace: Pace, undisturbed: Played) -> None:
    """The folder of the data is moved away while the job runs, and back when the trainers say so."""
    data, away = folder.with_suffix(".data"), folder.with_suffix(".away")
    training.StoredBlobs(str(data)).store()
    described = graphft.dataset(
        f"{training.__file__}:StoredBlobs", {"folder": str(data), "pace": str(pace.file)}, chunk_size=training.CHUNK
    )
    played = play(
        training.job(program, data=described, max_failures=1),
        folder,
        [
            Act(lambda s: s.step >= 10, lambda _: data.rename(away)),
            Act(waiting, lambda _: away.rename(data)),
            Act(lambda s: True, lambda _: pace.set(0)),
        ],
        trainers=2,
    )
    assert {"storage-wait", "storage-waited"} <= set(played.events)
    assert not {"step-failed", "discarded"} & set(played.events)
    assert_same_bits(played.state, undisturbed.state)
