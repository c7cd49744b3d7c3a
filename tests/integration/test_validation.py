"""Validation beside the steps, of real jobs: its values and decisions do not depend on who dies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft import ir
from graphft.plan import Plan
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.executor import validate_here
from graphft.transpiler.evaluation import evaluation_of
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, at, kill, play

pytestmark = pytest.mark.timeout(600)
sys.path.insert(0, str(Path(__file__).parent))  # as the script has it
from tests.integration import validated  # noqa: E402


def make(program: ir.Program, pace: Path | None = None, slow: Path | str = "") -> graphft.Job:
    """Its learning rate goes down, its best model is kept, and it ends early."""
    validation = validated.validation(
        slow,
        every=5,
        best=graphft.Criterion("balanced", "max"),
        stop=graphft.EarlyStopping("loss", patience=2, min_delta=0.004),
        plateau=graphft.ReduceLROnPlateau("loss", factor=0.5, patience=0, threshold=0.05),
    )
    return training.job(program, pace=pace, validate=validation)


@pytest.fixture(scope="module")
def calm(program: ir.Program, workplace: Path, nursery: Any) -> Played:
    from tests.integration.conftest import at_work

    with at_work(nursery):
        return play(make(program), workplace / "validated-undisturbed")


def test_it_comes_to_what_the_model_gives_in_one_process(calm: Played, program: ir.Program) -> None:
    *_, last = calm.result.validations
    assert last == calm.result.steps < calm.job.config.total_steps, "it ended early"
    assert any("learning rates are" in e.text for e in calm.statuses[-1].events)
    validation, weights = validated.validation(""), graphft.read_weights(calm.result.model)
    here = validate_here(evaluation_of(program, validation), validation.config(), weights, "cpu")
    assert here.pop("samples") == validated.RECORDS
    assert calm.result.validations[last] == here
    model = training.network().eval()
    graphft.load_into(model, calm.result.model)
    blobs = training.Blobs(validated.RECORDS)
    with torch.no_grad():
        loss, more = validated.with_scores(model, blobs.x, blobs.y)
    assert here["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert here["balanced"] == float(validated.balanced(more["best"], more["labels"]))
    assert calm.result.best is not None
    assert calm.result.best.value == max(row["balanced"] for row in calm.result.validations.values())


def validating(status: JobStatus) -> bool:
    return bool(status.validating) and status.step >= 5


class Told:
    """A callback."""

    def __init__(self) -> None:
        self.validations: list[tuple[int, dict[str, float]]] = []

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.validations.append((step, metrics))


def test_kills_do_not_change_a_digit(program: ir.Program, folder: Path, pace: Pace, calm: Played) -> None:
    told, slow = Told(), Pace(pace.file.with_suffix(".slow"))  # a validation is seen before it is over
    acts = [
        Act(validating, kill("trainer", 0)),
        Act(validating, kill("pserver", 1)),
        Act(at(calm.result.steps - 12), kill("trainer", 0, 1, 2)),
        Act(validating, kill("pserver", 0, 1)),
    ]
    played = play(make(program, pace.file, slow.file), folder, acts, callbacks=[told])
    assert played.result.validations == calm.result.validations
    assert told.validations == list(calm.result.validations.items())
    for one, other in (
        (played.result.model, calm.result.model),
        (played.result.best.model, calm.result.best.model),  # type: ignore[union-attr]
    ):
        here, there = graphft.read_weights(one), graphft.read_weights(other)
        assert all(torch.equal(here[name], there[name]) for name in there)
    assert not (folder / "entries").exists() or not any((folder / "entries").iterdir())


def test_the_steps_that_are_validated() -> None:
    config = validated.validation("", every=3).config()
    assert config.steps(Plan([10, 10], slots=2, batch_size=5, seed=0, passes=4)) == {3, 6, 8}
    each = validated.validation("").config()
    assert each.steps(Plan([10, 10], slots=2, batch_size=5, seed=0, passes=4)) == {2, 4, 6, 8}
    assert [r[2] for r in each.ranges] == [8, 1, 8, 1, 8, 1, 8]
