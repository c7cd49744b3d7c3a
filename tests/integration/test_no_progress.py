"""Trainers that live and get nowhere: one that hangs, one that does not reach a shard. Others do their work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from graphft import ir
from graphft.runtime.coordination.connect import read_note
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.supervisor import Supervisor
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, Program, assert_same_bits, at, play
from tests.transport.relay import Relay

pytestmark = pytest.mark.timeout(600)
CUT = """
import sys
from graphft.runtime.roles.environment import RoleSpec, run_role
from graphft.runtime.roles.trainer import state, sync_comm
from graphft.runtime.roles.trainer.shard_link import ShardLink
from graphft.transpiler import Job

job_dir, endpoints, relayed, relay = sys.argv[1:]
address_of = ShardLink.address_of
ShardLink.address_of = lambda self, up: relay if (a := address_of(self, up)) == relayed else a
state.SILENT_SECONDS, sync_comm.STALL_SECONDS = 1.5, 1.5
sys.exit(run_role(Job.load(job_dir), job_dir, RoleSpec("trainer", 7, etcd=endpoints)))
"""


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def texts(played: Played, kind: str) -> list[str]:
    return [event.text for event in played.statuses[-1].events if event.kind == kind]


@pytest.mark.slow
def test_a_trainer_that_hangs_is_ended_and_a_spare_does_its_work(
    program: ir.Program, folder: Path, hangs: Path, undisturbed: Played
) -> None:
    """Its daemon thread renewed its lease, and claimed the slot again whenever it was taken."""
    (hangs / "once").touch()
    job = training.job(program, blobs={"hangs": str(hangs)}, chunk_timeout=10.0, lease_ttl=60)
    played = play(job, folder, trainers=4)
    assert_same_bits(played.state, undisturbed.state)
    assert sum(played.result.failures.values()) == 1, texts(played, "died")
    assert played.result.preemptions == {}
    (text,) = texts(played, "hung")
    assert "made no progress for 9 s while computing" in text
    (where,) = [e.fields["where"] for e in played.statuses[-1].events if e.kind == "hung"]
    assert "in _hang" in where, "where the main thread is, or what reads ahead for it"
    assert not played.result.discarded, "once is no reason to discard a batch"


@pytest.mark.slow
def test_a_batch_that_always_hangs_is_discarded(program: ir.Program, folder: Path, hangs: Path) -> None:
    """It failed as one that raises an exception does."""
    for n in range(20):
        (hangs / str(n)).touch()
    options = {"chunk_timeout": 6.0, "max_failures": 2, "max_discarded": 1.0}
    job = training.job(program, blobs={"hangs": str(hangs)}, passes=1, **options)
    played = play(job, folder, trainers=2)
    assert sum(played.result.failures.values()) >= 2
    (discarded,) = played.result.discarded
    assert (discarded.chunk, discarded.pass_index) == (2, 0)
    assert "no progress for" in discarded.reason
    assert f"batch {discarded.batch} of chunk 2 in pass 0 was being read" in discarded.reason


@pytest.mark.slow
def test_a_trainer_that_does_not_reach_a_shard_gets_no_work(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played, cleanup: ExitStack
) -> None:
    """It held its slot (or its chunk), and everybody waited."""
    relays: list[Relay] = []
    programs: list[Program] = []

    def join(supervisor: Supervisor) -> None:
        target = addresses[0]
        relays.append(Relay(("127.0.0.1", int(target.rsplit(":", 1)[1]))))
        cleanup.callback(relays[0].close)
        programs.append(
            Program(
                folder.parent / f"{folder.name}-cut",
                "-c",
                CUT,
                folder,
                read_note(folder).endpoints,
                target,
                relays[0].address,
            )
        )
        cleanup.callback(programs[0].kill)

        pace.set(Pace.SLOW)

    addresses: dict[int, str] = {}

    def begun(status: JobStatus) -> bool:
        addresses.update({i: shard["address"] for i, shard in status.pservers.items()})
        return at(3)(status)

    def cut_off(status: JobStatus) -> dict[str, Any]:
        return next((t for name, t in status.trainers.items() if name.startswith("7-")), {})

    def unreached() -> str:
        return f"shard 0 at {addresses[0]}"

    def works(status: JobStatus) -> bool:
        holds = any(name.startswith("7-") for name in status.slots.values())
        return holds and cut_off(status).get("samples", 0) > 0

    played = play(
        training.job(program, pace=pace.file),
        folder,
        [
            Act(begun, join),
            Act(works, lambda _: relays[0].paused.set()),
            Act(lambda s: cut_off(s).get("unreached") == [unreached()], lambda _: pace.set(0)),
        ],
        trainers=2,
    )
    assert any(f"it cannot reach {unreached()}" in text for text in texts(played, "barred"))
    assert_same_bits(played.state, undisturbed.state)
    assert (played.result.failures, played.result.preemptions) == ({}, {})
    assert programs[0].wait() == 0, programs[0].output
