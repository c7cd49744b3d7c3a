"""Dead trainers' last notes are analysed. Of batches that were claimed: test_poison.py."""

from __future__ import annotations

import signal
from pathlib import Path
from unittest.mock import ANY, Mock

import msgspec
import pytest

from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import death_analysis
from graphft.runtime.launcher.death_analysis import REPORT_SECONDS, DeathAnalysis, Finding
from graphft.runtime.process.identity import identify
from graphft.runtime.process.role_process import EXIT_LEASE_LOST
from graphft.runtime.process.work_record import Phase, Place, WorkRecord, record_path
from graphft.runtime.protocol.chunk_queue import Change
from graphft.runtime.roles.trainer.step_check import Proof
from graphft.transpiler.job import Job
from tests.runtime.stubs import kinds

WHERE = " while checking its start with batch 0 of chunk 2 in pass 0"


@pytest.fixture
def deaths(etcd: Etcd, keys: Keys, tmp_path: Path) -> DeathAnalysis:
    etcd.put(keys.run, b"this-run")
    return DeathAnalysis(tmp_path, keys, etcd, Events(etcd, keys, "launcher"))


def record_proof(etcd: Etcd, keys: Keys, run: str = "this-run") -> None:
    proof = Proof(run, "trainer 1-abcd", "batch 0 of chunk 2", {}, "", {})
    etcd.put(keys.proof("trainer"), msgspec.json.encode(proof))


def dies(deaths: DeathAnalysis, how: signal.Signals) -> Finding:
    """Trainer 0, in its proof."""
    record = WorkRecord(record_path(deaths.job_dir, 0))
    record.begin(Phase.PROVING, Place(0, 2, 0))
    return deaths.died("trainer 0", 0, identify(), -how)


@pytest.mark.parametrize("other", [False, True], ids=["none", "of another run"])
def test_a_death_in_a_proof_that_nobody_has_made_is_not_counted(
    deaths: DeathAnalysis, etcd: Etcd, keys: Keys, other: bool
) -> None:
    if other:
        record_proof(etcd, keys, "another-run")
    assert dies(deaths, signal.SIGSEGV) == (WHERE, None, False)
    assert dies(deaths, signal.SIGKILL) == (WHERE, None, False)


def test_a_death_in_a_proof_that_others_have_made_counts(deaths: DeathAnalysis, etcd: Etcd, keys: Keys) -> None:
    record_proof(etcd, keys)
    assert dies(deaths, signal.SIGSEGV) == (WHERE, None, True)


def test_being_killed_again_and_again_in_it_counts_too(deaths: DeathAnalysis, etcd: Etcd, keys: Keys) -> None:
    record_proof(etcd, keys)
    assert [dies(deaths, signal.SIGKILL).counts for _ in range(4)] == [None, None, True, True]


@pytest.mark.parametrize(
    ("phase", "fatal"), [(Phase.COMPUTING, True), (Phase.READING, True), (Phase.IDLE, False), (Phase.PROVING, False)]
)
def test_user_code_that_ends_with_the_status_of_a_lost_lease(
    deaths: DeathAnalysis, monkeypatch: pytest.MonkeyPatch, phase: Phase, fatal: bool
) -> None:
    charged: list[str] = []
    monkeypatch.setattr(deaths, "_charge", lambda what, *_: charged.append(what))
    WorkRecord(record_path(deaths.job_dir, 0)).begin(phase, Place(0, 2, 0), claim=7)
    deaths.died("trainer 0", 0, identify(), EXIT_LEASE_LOST)
    assert bool(charged) == fatal


@pytest.mark.parametrize("counted", [True, False])
def test_a_batch_that_kills_is_told_to_the_coordinator_of_a_job_that_has_one(
    deaths: DeathAnalysis, etcd: Etcd, keys: Keys, coordinated: Job, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    named = Job.make(coordinated.source, coordinated.config.replace(name=keys.job))
    named.save(deaths.job_dir / "job")
    deaths.job_dir /= "job"
    change = Change("released", reason="it failed once") if counted else None
    admitted = []

    def admit(*args: object, **_: object) -> Change | None:
        admitted.append(etcd.get(keys.guests + args[2].keys.public) is not None)
        return change

    report = Mock(side_effect=admit)
    monkeypatch.setattr(death_analysis, "report_failed", report)
    WorkRecord(record_path(deaths.job_dir, 0)).begin(Phase.COMPUTING, Place(1, 2, 3), claim=7)
    found = deaths.died("trainer 0", 0, identify(), -signal.SIGSEGV)
    reason = "trainer 0 died (killed by SIGSEGV) while computing batch 3 of chunk 2 in pass 1"
    report.assert_called_once_with(etcd, keys, ANY, Place(1, 2, 3), claim=7, reason=reason, deadline=REPORT_SECONDS)
    assert admitted == [True], "the coordinator knows the launcher's key, as long as it reports"
    assert not etcd.range(keys.guests).kvs
    assert found.blamed is change
    assert kinds(etcd, keys) == ["step-failed"] * counted
