"""Whole jobs while etcd or the disk fails, or comes back older than it was: the same bits, and nothing starts over."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from etcd.servers import cure, fill, full_etcd

from graphft import ir
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher import supervise
from tests.integration import training
from tests.integration.plays import (
    Act,
    Pace,
    Played,
    Program,
    assert_same_bits,
    at,
    await_gone,
    etcds_of,
    kill,
    play,
    whole_state,
)
from tests.support.disks import small_file_system
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]
SECONDS = 120.0
"""For each thing that is waited for: the machine may be busy."""


def back_up(job_dir: Path) -> None:
    """Copies what the job's etcd has on the disk now; it is frozen meanwhile, as by a snapshot of a file system.

    Its launcher kills one that is frozen for seconds: the next one is copied then.
    """
    backup = job_dir.with_suffix(".backup")

    def copied() -> bool:
        shutil.rmtree(backup, ignore_errors=True)
        try:
            (etcd,) = etcds_of(job_dir)
            etcd.suspend()
            until(lambda: etcd.status() == psutil.STATUS_STOPPED)
            shutil.copytree(job_dir / "etcd", backup)
            whole = etcd.status() == psutil.STATUS_STOPPED
            etcd.resume()
        except (psutil.Error, OSError, ValueError):  # it has ended
            return False
        return whole

    until(copied)


@pytest.mark.slow
def test_an_etcd_that_is_restored_from_an_early_backup(
    program: ir.Program, folder: Path, pace: Pace, undisturbed: Played
) -> None:
    """Of a backup of the first moment, the job began at step 0."""
    job_dir, launch = folder / "job", ["-m", "graphft", "launch", "--job", folder / "job"]
    training.job(program, pace=pace.file).save(job_dir)
    pace.set(Pace.SLOW)  # the first checkpoint is of step 10, and what is seen of the job may be a second old
    launcher = Program(folder, *launch)
    launcher.until(job_dir, lambda s: at(2)(s) and s.checkpoint is None, seconds=SECONDS)
    back_up(job_dir)
    pace.set(0.05)
    before = launcher.until(job_dir, lambda s: at(31)(s) and (s.checkpoint or 0) >= 30, seconds=SECONDS)
    launcher.kill()
    assert not await_gone(folder)
    shutil.rmtree(job_dir / "etcd")
    job_dir.with_suffix(".backup").rename(job_dir / "etcd")
    again = Program(folder, *launch)
    status = again.until(job_dir, lambda s: at(31)(s) and "etcd-behind" in kinds(s), seconds=SECONDS)
    begun = [e.fields["step"] for e in status.events if e.kind == "etcd-behind"]
    assert min(begun) >= (before.checkpoint or 0)
    pace.set(0)
    assert again.wait(SECONDS) == 0, again.output
    assert_same_bits(whole_state(undisturbed.job, job_dir), undisturbed.state)


def kinds(status: JobStatus) -> list[str]:
    return [event.kind for event in status.events]


@pytest.mark.slow
def test_a_job_waits_for_an_etcd_that_is_full(
    program: ir.Program,
    folder: Path,
    pace: Pace,
    undisturbed: Played,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing ends, is lost, or is done twice; a shard that dies meanwhile comes back when etcd takes records again.
    The launcher says so, and that it is over."""
    monkeypatch.setattr(supervise, "ALARM_EVERY_SECONDS", 0.2)
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
        played = play(
            training.job(program, pace=pace.file, lease_ttl=60), folder, acts, etcd=",".join(server.endpoints)
        )
    assert_same_bits(played.state, undisturbed.state)
    assert played.result.failures == {}
    assert set(played.result.preemptions) == {"pserver 1"}
    said = capsys.readouterr().err
    assert said.index("etcd is FULL: its quota is used up, and the job waits") < said.index("etcd takes records again")


@pytest.fixture
def small_disk(workplace: Path) -> Iterator[Path]:
    """A file system of 8 MB, in which a job's folder can be."""
    with small_file_system(workplace / "disk", mebibytes=8) as disk:
        yield disk


@pytest.mark.slow
def test_a_job_trains_on_while_its_disk_is_full(
    program: ir.Program, small_disk: Path, pace: Pace, undisturbed: Played, etcd_server: Any
) -> None:
    """Its pservers ended, and were started again until there were too many failures."""
    filler = small_disk / "filler"

    def be_full(_: Any) -> None:
        with filler.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    played = play(
        training.job(program, pace=pace.file, lease_ttl=60),
        small_disk / "job",
        [
            Act(lambda s: at(4)(s), lambda _: pace.set(Pace.SLOW)),
            Act(lambda s: (s.checkpoint or 0) >= 10, be_full),
            Act(lambda s: "checkpoint-trouble" in kinds(s), lambda _: os.truncate(filler, 0)),
            Act(lambda s: "checkpoint-mended" in kinds(s), lambda _: pace.set(0)),
        ],
        etcd=",".join(etcd_server.endpoints),
    )
    assert_same_bits(played.state, undisturbed.state)
    assert (played.result.failures, played.result.preemptions) == ({}, {})
    assert played.statuses[-1].generation == 0, "nobody went back"
