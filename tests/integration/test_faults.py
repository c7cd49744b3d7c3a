"""Whatever is killed, stopped, added or removed, the final state has the bits of the undisturbed run, and that is what
one process comes to."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from graphft import ir
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import EtcdError
from graphft.runtime.launcher.supervisor import Supervisor
from tests.integration import training
from tests.integration.impostor import ANSWERED, BOUND, HEARD, LOGINS, Impostor
from tests.integration.plays import (
    RUN,
    SCRIPT,
    Act,
    Pace,
    Played,
    Program,
    assert_model,
    assert_same_bits,
    at,
    await_gone,
    etcds_of,
    kill,
    play,
    send,
    settled,
    whole_state,
)
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)


def test_the_undisturbed_run_equals_training_in_one_process(undisturbed: Played) -> None:
    """Each slot's batch has its own batch-norm statistics and its own dropout; the rest is one process's arithmetic."""
    job = undisturbed.job
    assert job.config.total_steps == 80 == undisturbed.result.steps
    assert_model(undisturbed.result.model, training.trained_in_one_process(job, training.network()))
    losses = undisturbed.result.metrics["loss"]
    assert [step for step, _ in losses] == list(range(job.config.total_steps))
    assert sum(loss for _, loss in losses[-9:]) < sum(loss for _, loss in losses[:9])


def holders(status: JobStatus) -> set[int]:
    """Indices of the trainers that hold slots."""
    return {int(name.split("-")[0]) for name in status.slots.values()}


def test_who_takes_a_dead_pservers_port_is_nobody(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played
) -> None:
    """While etcd is frozen the trainers cannot know that another process listens at the port."""
    with ExitStack() as stack:

        def take_port(status: JobStatus) -> bool:
            if not at(10)(status):
                return False
            dead, living = (status.pservers[index]["address"] for index in (0, 1))
            impostors.append(stack.enter_context(Impostor(dead, living)))
            return True

        def freeze_and_kill(supervisor: Supervisor) -> bool:
            (etcd,) = etcds_of(folder)
            etcd.suspend()
            threading.Thread(target=resume, args=(etcd,)).start()
            return kill("pserver", 0)(supervisor)

        def resume(etcd: psutil.Process) -> None:
            with contextlib.suppress(AssertionError):
                until(lambda: impostors[0].counts[LOGINS], 4.0)
            etcd.resume()

        impostors: list[Impostor] = []
        played = play(training.job(program, pace=pace.file), folder, [Act(take_port, freeze_and_kill)])
        (counts,) = (list(impostor.counts) for impostor in impostors)
    assert_same_bits(played.state, undisturbed.state)
    assert min(counts[BOUND], counts[LOGINS]) > 0, "nobody has connected to it: the test shows nothing"
    assert (counts[HEARD], counts[ANSWERED]) == (0, 0)


def test_trainers_die_join_and_leave(program: ir.Program, folder: Path, pace: Pace, undisturbed: Played) -> None:
    working: set[str] = set()
    killed: set[str] = set()

    def all_work(status: JobStatus) -> bool:
        """None of them was killed: a status that was asked for before may come after, and a process ends after it."""
        working.clear()
        working.update(status.slots.values())
        return settled(status) and holders(status) == {0, 1, 2} and not working & killed

    def kill_noted(*indices: int) -> Callable[[Supervisor], bool]:
        def do(supervisor: Supervisor) -> bool:
            done = kill("trainer", *indices)(supervisor)
            killed.update(name for name in working if done and int(name.split("-")[0]) in indices)
            return done

        return do

    played = play(
        training.job(program, pace=pace.file, lease_ttl=60),
        folder,
        [
            Act(lambda s: at(8)(s) and all_work(s), kill_noted(1)),
            Act(lambda s: s.step >= 14 and holders(s) >= {0, 2}, lambda _: pace.set(Pace.SLOW)),
            Act(all_work, kill_noted(0, 1, 2)),
            Act(all_work, lambda supervisor: supervisor.add("trainer", 3)),
            Act(
                lambda s: len(s.trainers) == 4 and settled(s) and holders(s) == {0, 1, 2},  # one stands by
                send(signal.SIGTERM, "trainer", 0),
            ),
            Act(lambda s: holders(s) == {1, 2, 3} and len(s.trainers) == 3, lambda _: pace.set(0)),
        ],
    )
    assert_same_bits(played.state, undisturbed.state)
    assert played.result.preemptions == {"trainer 0": 1, "trainer 1": 2, "trainer 2": 1}
    assert played.result.failures == {}
    assert played.statuses[-1].generation == 0, "losing trainers repeats no step"
    assert played.events.count("takeover") >= 1


def test_pservers_die(program: ir.Program, folder: Path, pace: Pace, undisturbed: Played) -> None:
    """They die before the first checkpoint, alone, and both at once."""
    pace.set(0.2)  # what is waited for lasts for 20 steps
    job = training.job(program, pace=pace.file, checkpoint_every=25, recovery_timeout=120, lease_ttl=60)
    played = play(
        job,
        folder,
        [
            Act(lambda s: at(5)(s) and s.checkpoint is None, kill("pserver", 1)),
            Act(lambda s: at(26)(s) and s.generation == 1 and s.checkpoint == 25, kill("pserver", 0)),
            Act(lambda s: at(51)(s) and s.generation == 2 and s.checkpoint == 50, kill("pserver", 0, 1)),
            Act(lambda s: at(50)(s) and s.generation >= 3, lambda _: pace.set(0)),
        ],
    )
    assert_same_bits(played.state, undisturbed.state)
    assert played.result.preemptions == {"pserver 0": 2, "pserver 1": 2}
    assert played.result.failures == {}, "trainers wait for pservers"
    restarted = [event.fields["step"] for event in played.statuses[-1].events if event.kind == "restarted"]
    assert restarted == [0, 25, 50, 50], "each goes on from the newest committed step"


def test_the_whole_job_dies_and_goes_on_and_so_does_its_etcd(folder: Path, pace: Pace, undisturbed: Played) -> None:
    """The launcher is killed: nothing of it is left. Started again, the job resumes by itself; then etcd is killed."""
    job_dir = folder / RUN
    launcher = Program(folder, "-m", "graphft", "launch", "--trainers", "2", SCRIPT, pace.file)
    launcher.until(job_dir, lambda s: at(25)(s) and s.checkpoint is not None)
    launcher.kill()
    assert not await_gone(folder)
    again = Program(folder, SCRIPT, pace.file)
    status = again.until(
        job_dir, lambda s: at(21)(s) and s.generation > 0 and len(s.slots) == 3 and "goes on from step" in again.output
    )  # the display comes a little later
    (etcd,) = etcds_of(job_dir)
    etcd.kill()
    again.until(job_dir, lambda s: s.step > status.step + 10)
    pace.set(0)
    assert again.wait() == 0, again.output
    assert "complete: 80 steps" in again.output
    assert "etcd died" in again.output
    assert_same_bits(whole_state(undisturbed.job, job_dir), undisturbed.state)


def serving(status: JobStatus) -> list[str]:
    return [name for name, coordinator in status.coordinators.items() if coordinator["serving"]]


def test_another_coordinator_takes_over(program: ir.Program, folder: Path, pace: Pace, undisturbed: Played) -> None:
    killed: list[str] = []

    def kill_the_one_that_serves(supervisor: Supervisor) -> bool:
        with contextlib.suppress(EtcdError):
            found = supervisor.view.coordinator
            if found is not None and kill("coordinator", int(found.id.partition("-")[0]))(supervisor):
                killed.append(found.id)
        return bool(killed)

    def both(status: JobStatus) -> bool:
        return at(10)(status) and len(status.coordinators) == 2 and bool(serving(status))

    job = training.job(program, pace=pace.file, dispatch="coordinator", lease_ttl=60)
    another = Act(lambda status: both(status) and serving(status) != killed, lambda supervisor: pace.set(0))
    played = play(job, folder, [Act(both, kill_the_one_that_serves), another], coordinators=2)
    assert_same_bits(played.state, undisturbed.state)
    assert played.result.preemptions == {f"coordinator {killed[0].partition('-')[0]}": 1}
    assert played.result.failures == {}
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
    told = [e.text for e in played.statuses[-1].events if e.kind == "coordinator"]
    assert all(text.endswith("gives out tasks") for text in told[:2]), "on a busy machine others may follow"
    assert len(told) > 1


@pytest.mark.slow
def test_a_trainer_that_hangs_is_ended_and_a_spare_does_its_work(
    program: ir.Program, folder: Path, tmp_path: Path, undisturbed: Played
) -> None:
    (tmp_path / "hangs").mkdir()
    (tmp_path / "hangs" / "once").touch()
    job = training.job(program, blobs={"hangs": str(tmp_path / "hangs")}, chunk_timeout=10.0, lease_ttl=60)
    played = play(job, folder, trainers=4)
    assert_same_bits(played.state, undisturbed.state)
    assert sum(played.result.failures.values()) == 1
    assert played.result.preemptions == {}
    (hung,) = [e for e in played.statuses[-1].events if e.kind == "hung"]
    assert "made no progress for 9 s while computing" in hung.text
    assert "in _hang" in hung.fields["where"], "where the main thread is, or what reads ahead for it"
    assert not played.result.discarded, "once is no reason to discard a batch"
