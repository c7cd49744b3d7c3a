"""A job whose launcher was killed goes on with fewer trainer processes than before."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from tests.integration import training
from tests.integration.plays import Pace, Played, Program, assert_same_bits, at, await_gone, whole_state

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_job_goes_on_with_fewer_trainers_than_before(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played, etcd_server: EmbeddedEtcd
) -> None:
    """With an etcd that outlives it and holds the slots of the dead."""
    job_dir, endpoints = folder / "job", ",".join(etcd_server.endpoints)
    training.job(program, pace=pace.file).save(job_dir)
    launch = ["-m", "graphft", "launch", "--job", job_dir, "--etcd", endpoints, "--trainers"]
    first = Program(folder, *launch, "3")
    first.until(job_dir, lambda s: at(12)(s) and len(set(s.slots.values())) == 3, etcd=endpoints)
    first.kill()
    assert not await_gone(job_dir)
    pace.set(0)
    second = Program(folder, *launch, "1")
    assert second.wait() == 0, second.output
    assert_same_bits(whole_state(undisturbed.job, job_dir), undisturbed.state)
    with Etcd(etcd_server.endpoints, deadline=60) as etcd:
        for prefix in Keys("blobs").everything:
            etcd.delete_prefix(prefix)
