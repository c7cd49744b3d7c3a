"""The supervisor's handling of processes: restarts, delays, giving up, leases, and what is left behind (nothing).

The children are small stand-ins for roles; all else is real.
"""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import child as child_module
from graphft.runtime.launcher import supervisor as module
from graphft.runtime.launcher.death_analysis import Finding
from graphft.runtime.launcher.process_ends import ProcessEnds, read_ends
from graphft.runtime.launcher.supervise import supervise as supervise_job
from graphft.runtime.process.work_record import Phase
from tests.runtime.stubs import SLEEP, Stubs, pid, steps, texts

REGISTER = """
import os, socket, sys, time
import msgspec
from graphft.runtime.etcd import Etcd, Session
from graphft.runtime.process.identity import identify
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Registration
endpoints, job, role, index = sys.argv[1:5]
etcd, keys = Etcd([endpoints], timeout=20, deadline=60), Keys(job)
session = Session(etcd, 100)
name = f"{index}-abcd"
key = keys.pserver(int(index)) if role == "pserver" else getattr(keys, role)(name)
etcd.put(keys.slot(int(index)), name.encode(), session.lease)
record = Registration(name, "", os.getpid(), socket.gethostname(), process=identify())
etcd.put(key, msgspec.json.encode(record), session.lease)
time.sleep(100)
"""
REPORT = """
import sys
from pathlib import Path
from graphft.runtime.process.work_record import Phase, Place, WorkRecord, record_path
record = WorkRecord(record_path(Path(sys.argv[1]), 0))
record.begin(Phase.READING, Place(0, 0, 0), claim=7)
record.mark(Phase(int(sys.argv[2])))
record.end()
sys.exit(1)
"""


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", 0.05)


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_killed_child_is_started_again_at_once(
    supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch, etcd: Etcd, keys: Keys
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", 60.0)
    supervisor = supervise(max_restarts=0)
    child = supervisor.add("trainer", 1)
    other = supervisor.add("pserver", 0)
    first, spared = pid(child), pid(other)
    assert supervisor.signal("trainer", 1, signal.SIGKILL)
    steps(supervisor, lambda: pid(child) != first)
    assert (child.preemptions, child.failures, pid(other)) == (1, 0, spared)
    assert texts(etcd, keys) == ["trainer 1 died (killed by SIGKILL), starting it again"]
    assert read_ends(supervisor.job_dir) == ProcessEnds(0, {}, {"trainer 1": 1})
    assert not supervisor.failed


def test_failures_are_retried_with_growing_delays_and_then_given_up(
    supervise: Any, stubs: Stubs, etcd: Etcd, keys: Keys
) -> None:
    stubs.code = "import sys; print('about to fail'); sys.exit('the reason')"
    supervisor = supervise(max_restarts=3)
    child = supervisor.add("trainer", 0)
    steps(supervisor, lambda: supervisor.failed)
    gaps = [b - a for a, b in zip(stubs.started, stubs.started[1:], strict=False)]
    assert len(gaps) == 3
    assert all(gap >= delay for gap, delay in zip(gaps, (0.05, 0.1, 0.2), strict=True)), gaps
    assert (child.failures, child.preemptions, child.done, supervisor.all_done) == (4, 0, True, True)
    assert "trainer 0 failed 4 times in a row, --max-restarts is 3" in supervisor.failed
    assert supervisor.failed.endswith("the reason"), "the end of its log"
    assert "trainer-0.log" in supervisor.failed
    assert texts(etcd, keys)[-1] == "trainer 0 failed 4 times in a row, --max-restarts is 3"


def test_progress_of_the_job_between_failures_lets_a_role_fail_again(supervise: Any, stubs: Stubs) -> None:
    stubs.code = "import sys; sys.exit(1)"
    supervisor = supervise(max_restarts=1)
    child = supervisor.add("trainer", 0)
    for failures in (1, 2, 3):
        steps(supervisor, lambda failures=failures: child.failures == failures)
        assert not supervisor.failed
        supervisor.take_progress(failures, 10 * failures)
    supervisor.take_progress(3, 40)  # steps that are repeated
    supervisor.take_progress(4, 30)  # a step without data
    steps(supervisor, lambda: supervisor.failed)
    assert child.failures == 5


def test_preemptions_are_never_given_up_on_but_do_not_burn_the_machine(
    supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "QUICK_PREEMPTION_SECONDS", 600.0)
    stubs.code = "import sys; sys.exit(75)"
    supervisor = supervise(max_restarts=0)
    child = supervisor.add("trainer", 0)
    steps(supervisor, lambda: child.preemptions >= 4)
    gaps = [b - a for a, b in itertools.pairwise(stubs.started[:4])]
    assert all(gap >= delay for gap, delay in zip(gaps, (0.0, 0.1, 0.2), strict=True)), gaps
    assert (child.failures, supervisor.failed) == (0, "")


def test_wrong_usage_is_given_up_at_once(supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_WORK_SECONDS", 600.0)
    stubs.code = "import sys; sys.stderr.write('error[determinism]: torch differs\\n'); sys.exit(2)"
    supervisor = supervise()
    supervisor.add("pserver", 0)
    steps(supervisor, lambda: supervisor.failed)
    assert len(stubs.started) == 1
    headline = supervisor.failed.splitlines()[0]
    assert headline == "pserver 0 cannot start (exit status 2): error[determinism]: torch differs"
    assert supervisor.failed.endswith("error[determinism]: torch differs")


def test_a_trainer_that_cannot_start_is_tried_again_while_another_one_works(
    supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_WORK_SECONDS", 0.0)
    monkeypatch.setattr(module, "CANNOT_START_SECONDS", 0.1)
    supervisor = supervise()
    worker = supervisor.add("trainer", 0)
    steps(supervisor, lambda: pid(worker))
    stubs.code = "import sys; sys.exit(2)"
    supervisor.add("trainer", 1)
    steps(supervisor, lambda: len(stubs.started) >= 4)
    assert not supervisor.failed
    supervisor.signal("trainer", 0, signal.SIGKILL)
    steps(supervisor, lambda: supervisor.failed)
    assert "cannot start (exit status 2)" in supervisor.failed


@pytest.mark.parametrize(("number", "counts"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_a_death_counts_as_its_analysis_says(
    supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch, number: int, counts: bool
) -> None:
    stubs.code = f"import os; os.kill(os.getpid(), {number:d})"
    supervisor = supervise(max_restarts=2)
    monkeypatch.setattr(supervisor._deaths, "died", lambda *_: Finding("", None, counts))
    child = supervisor.add("trainer", 0)
    steps(supervisor, lambda: child.failures + child.preemptions == 6 or child.done)
    assert ("trainer 0 failed 3 times in a row" in supervisor.failed) == counts


def test_without_fault_tolerance_a_death_is_the_end(supervise: Any, stubs: Stubs) -> None:
    supervisor = supervise(restart=False)
    supervisor.add("trainer", 0)
    supervisor.signal("trainer", 0, signal.SIGKILL)
    steps(supervisor, lambda: supervisor.failed)
    assert "died (killed by SIGKILL), and the job has no fault tolerance" in supervisor.failed
    assert len(stubs.started) == 1


def test_status_0_before_the_job_is_over_is_a_failure(supervise: Any, stubs: Stubs, etcd: Etcd, keys: Keys) -> None:
    stubs.code = ""
    supervisor = supervise(max_restarts=1)
    child = supervisor.add("trainer", 0)
    steps(supervisor, lambda: supervisor.failed)
    assert (child.failures, len(stubs.started)) == (2, 2)
    assert texts(etcd, keys)[0] == "trainer 0 died (exit status 0, before the job was over), starting it again"


def test_a_trainer_that_left_in_order_is_done(supervise: Any, stubs: Stubs, tmp_path: Path) -> None:
    stubs.code = f"""
from pathlib import Path
from graphft.runtime.process.work_record import Phase, WorkRecord, record_path
WorkRecord(record_path(Path({str(tmp_path)!r}), 3)).mark(Phase.LEFT)
"""
    supervisor = supervise()
    child = supervisor.add("trainer", 3)
    steps(supervisor, lambda: child.done)
    assert (child.failures, supervisor.failed) == (0, "")


@pytest.mark.parametrize(("phase", "delays"), [("REPORTED", ["", ""]), ("COMPUTING", ["", " in 1 s"])])
def test_a_failure_that_the_queue_counts_does_not_make_the_next_start_later(
    supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch, etcd: Etcd, keys: Keys, phase: str, delays: list[str]
) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", 0.6)
    supervisor = supervise(max_restarts=2)
    stubs.code, stubs.arguments = REPORT, [str(supervisor.job_dir), str(int(Phase[phase]))]
    supervisor.add("trainer", 0)
    steps(supervisor, lambda: supervisor.failed)
    assert texts(etcd, keys)[:2] == [f"trainer 0 died (exit status 1), starting it again{delay}" for delay in delays]
    assert "trainer 0 failed 3 times in a row" in supervisor.failed, "no step came about in between"


def test_a_coordinator_that_was_asked_to_leave_is_started_again_at_once(supervise: Any, stubs: Stubs) -> None:
    stubs.code = ""
    supervisor = supervise(max_restarts=0)
    child = supervisor.add("coordinator", 0)
    steps(supervisor, lambda: len(stubs.started) == 2)
    assert (child.failures, child.preemptions, supervisor.failed) == (0, 1, "")


# -- the end -----------------------------------------------------------------------------------------------------------


def test_stop_ends_stopped_children_and_those_that_ignore_sigterm(supervise: Any, stubs: Stubs, tmp_path: Path) -> None:
    supervisor = supervise()
    stopped = supervisor.add("trainer", 0)
    supervisor.signal("trainer", 0, signal.SIGSTOP)
    supervisor.stop(grace=60.0)
    supervisor = supervise()
    stubs.code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"
    stubborn = supervisor.add("trainer", 1)
    steps(supervisor, lambda: "up" in (tmp_path / "logs" / "trainer-1.log").read_text())
    supervisor.stop(grace=0.5)
    assert (stopped.process.poll(), stubborn.process.poll()) == (-signal.SIGTERM, -signal.SIGKILL)


def test_nothing_is_started_after_stop(supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "BACKOFF_SECONDS", 60.0)
    stubs.code = "import sys; sys.exit(1)"
    supervisor = supervise()
    child = supervisor.add("trainer", 0)
    steps(supervisor, lambda: child.restart_at is not None)
    supervisor.stop()
    assert child.restart_at is None
    supervisor.step(0.0)
    assert len(stubs.started) == 1


def test_who_drives_it_ends_it_before_any_status(supervise: Any) -> None:
    supervisor = supervise()
    supervisor.look = Mock(side_effect=[None, KeyboardInterrupt])
    supervisor.add("pserver", 0)
    with Etcd(["127.0.0.1:9"], timeout=0.1, deadline=0.1) as supervisor.etcd, pytest.raises(KeyboardInterrupt):
        supervise_job(supervisor, lambda _: None)


# -- leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["trainer", "coordinator"])
def test_the_lease_of_a_dead_child_is_revoked_at_once(
    supervise: Any, stubs: Stubs, etcd: Etcd, keys: Keys, role: str
) -> None:
    stubs.code, stubs.arguments = REGISTER, [etcd.endpoints[0], keys.job]
    stubs.arguments += [role, "1"]
    supervisor = supervise()
    child = supervisor.add(role, 1)
    prefix = getattr(keys, f"{role}s")
    steps(supervisor, lambda: etcd.count(prefix) == 1)
    other = etcd.lease_grant(100)[0]
    etcd.put(keys.slot(0), b"another's", other)
    stubs.code = SLEEP
    first = pid(child)
    supervisor.signal(role, 1, signal.SIGKILL)
    steps(supervisor, lambda: pid(child) != first)
    steps(supervisor, lambda: etcd.count(prefix) == 0, 50.0)  # not after the 100 s of its lease
    assert [kv.value for kv in etcd.range(keys.slots).kvs] == [b"another's"]
    etcd.lease_revoke(other)


def test_a_frozen_child_is_replaced_when_its_lease_has_ended(
    supervise: Any, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FROZEN_SECONDS", 0.2)
    supervisor = supervise()
    frozen, slow, new = (supervisor.add("trainer", i) for i in range(3))
    before = [pid(child) for child in (frozen, slow, new)]
    supervisor.signal("trainer", 0, signal.SIGSTOP)
    slow_identity = slow.identity
    supervisor.replace_frozen({frozen.identity, slow_identity})

    def replaced() -> bool:
        supervisor.replace_frozen({slow_identity})
        return pid(frozen) != before[0]

    steps(supervisor, replaced)
    supervisor.replace_frozen(set())  # the slow one has just lost its lease, the new one never had any
    supervisor.replace_frozen(set())
    supervisor.step(0.3)
    assert [pid(slow), pid(new)] == before[1:]
    assert frozen.preemptions == 1
