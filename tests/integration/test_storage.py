"""Storage that is away for a while: nothing is discarded, and what is trained has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

import graphft
from graphft import ir
from graphft.runtime.coordination.status import JobStatus
from graphft.transpiler import Job
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, assert_same_bits, play

pytestmark = pytest.mark.timeout(600)


def waiting(status: JobStatus) -> bool:
    return any("waiting for storage: FileNotFoundError" in t.get("waiting", "") for t in status.trainers.values())


@pytest.mark.slow
def test_an_outage_discards_nothing(program: ir.Program, folder: Path, pace: Pace, undisturbed: Played) -> None:
    """The folder of the data is moved away while the job runs, and back when the trainers say so."""
    data, away = folder.with_suffix(".data"), folder.with_suffix(".away")
    training.StoredBlobs(str(data)).store()
    described = graphft.dataset(
        f"{training.__file__}:StoredBlobs", {"folder": str(data), "pace": str(pace.file)}, chunk_size=training.CHUNK
    )
    usual = training.job(program, max_failures=1)
    played = play(
        Job.make(usual.source, usual.config.replace(data=described)),
        folder,
        [
            Act(lambda s: s.step >= 10, lambda _: data.rename(away)),
            Act(waiting, lambda _: away.rename(data)),
            Act(lambda s: True, lambda _: pace.set(0)),
        ],
        trainers=2,
    )
    kinds = played.events
    assert "storage-wait" in kinds
    assert "storage-waited" in kinds
    assert not {"step-failed", "discarded"} & set(kinds)
    assert played.statuses[-1].queue == {"todo": 0, "pending": 0, "done": 12}
    assert_same_bits(played.state, undisturbed.state)
