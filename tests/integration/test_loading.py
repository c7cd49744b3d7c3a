"""Data that take longer to open, or to read, than a lease lasts."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from graphft import ir
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.launcher.display import format_line, process_rows
from graphft.runtime.process.role_process import EXIT_OK
from tests.integration import training
from tests.integration.plays import Act, Played, Program, assert_same_bits, await_gone, play
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_dataset_that_takes_longer_to_construct_than_a_lease_lasts(
    program: ir.Program, folder: Path, undisturbed: Played
) -> None:
    """The lease begins when the trainer is ready, and what it does until then is shown."""
    opening, ttl = folder.with_suffix(".opening"), 5
    job = training.job(program, blobs={"opening": str(opening)}, lease_ttl=ttl)
    opening.write_text("600")

    def all_load(status: JobStatus) -> bool:
        return len(status.loading) == 3 and min(p["seconds"] for p in status.loading.values()) > ttl + 1

    played = play(job, folder, [Act(all_load, lambda _: opening.unlink())])
    assert_same_bits(played.state, undisturbed.state)
    assert not played.result.failures
    # A machine that is very busy may lose leases later: what loads has none to lose, and is not started anew.
    loading = [s for s in itertools.takewhile(lambda s: len(s.trainers) < 3, played.statuses) if s.loading]
    seen = sorted(name.split("-")[0] for name in {name for s in loading for name in s.loading})
    assert seen == ["0", "1", "2"] or (played.result.preemptions and set(seen) == {"0", "1", "2"})
    assert {(p["role"], p["what"]) for s in loading for p in s.loading.values()} == {("trainer", "data")}
    assert max(p["seconds"] for s in loading for p in s.loading.values()) > ttl
    assert not played.statuses[-1].loading
    shown = next(s for s in loading if len(s.loading) == 3)
    assert "0 trainers (3 more loading)" in format_line(shown)
    assert all(at.startswith("loading data, ") for _, _, at, _, _ in list(process_rows(shown))[-3:])


@pytest.mark.slow
def test_a_trainer_that_loads_ends_with_its_job_or_when_it_is_told_to(
    program: ir.Program, folder: Path, etcd_server: EmbeddedEtcd
) -> None:
    """Nothing waits for the end of a construction that takes very long."""
    opening = folder.with_suffix(".opening")
    job = training.job(program, blobs={"opening": str(opening)}, name="loading-forever")
    opening.write_text("600")
    job.save(folder)
    endpoints, keys = ",".join(etcd_server.endpoints), Keys(job.config.name)
    with Etcd(etcd_server.endpoints, deadline=60) as etcd:
        put_job(etcd, keys, job)
        start = ("-m", "graphft", "start", "trainer", "--job", folder, "--etcd", endpoints, "--index")
        told, other = Program(folder.parent, *start, "0"), Program(folder.parent, *start, "1")

        def both(status: JobStatus) -> bool:
            return len(status.loading) == 2

        assert not told.until(folder, both, endpoints).trainers, "what is not ready is not registered"
        told.process.send_signal(signal.SIGTERM)
        assert told.wait() == EXIT_OK, told.output
        other.until(folder, lambda s: len(s.loading) == 1, endpoints)
        etcd.put(keys.state, b"complete")
        assert other.wait() == EXIT_OK, other.output
        until(lambda: etcd.count(keys.status) == 0)
        for prefix in keys.everything:
            etcd.delete_prefix(prefix)
    assert not await_gone(folder)
