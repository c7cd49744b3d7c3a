"""A trainer that lives and gets nowhere: others do its work."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft import ir
from tests.integration import training
from tests.integration.plays import Played, assert_same_bits, play

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_a_trainer_that_hangs_is_ended_and_a_spare_does_its_work(
    program: ir.Program, folder: Path, hangs: Path, undisturbed: Played
) -> None:
    (hangs / "once").touch()
    job = training.job(program, blobs={"hangs": str(hangs)}, chunk_timeout=10.0, lease_ttl=60)
    played = play(job, folder, trainers=4)
    assert_same_bits(played.state, undisturbed.state)
    assert sum(played.result.failures.values()) == 1
    assert played.result.preemptions == {}
    (hung,) = [e for e in played.statuses[-1].events if e.kind == "hung"]
    assert "made no progress for 9 s while computing" in hung.text
    assert "in _hang" in hung.fields["where"], "where the main thread is, or what reads ahead for it"
    assert not played.result.discarded, "once is no reason to discard a batch"
