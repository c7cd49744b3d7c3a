"""Validation beside the steps, of real jobs: what it comes to does not depend on who dies, and each is told once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft import ir
from graphft.errors import GraphftError
from graphft.plan import Plan
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.driver.validation import validate_here
from graphft.transpiler.evaluation import evaluation_of
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, at, kill, play

pytestmark = pytest.mark.timeout(600)
sys.path.insert(0, str(Path(__file__).parent))  # as the script has it
from tests.integration import validated  # noqa: E402

STEPS = [13, 26, 39, 52, 65, 78, 80]


class Told:
    """What `on_validation` is told."""

    def __init__(self) -> None:
        self.validations: list[tuple[int, dict[str, float]]] = []

    def on_validation(self, step: int, metrics: dict[str, float]) -> None:
        self.validations.append((step, metrics))


def make(program: ir.Program, pace: Pace | None, slow: Pace | None, **options: Any) -> graphft.Job:
    validation = validated.validation(slow.file if slow is not None else "", every=13)
    return training.job(program, pace=pace.file if pace is not None else None, validate=validation, **options)


@pytest.fixture(scope="module")
def calm(program: ir.Program, workplace: Path, nursery: Any) -> Played:
    """Making what is held out takes a second, in which the generators are seeded: that must not be beside a step."""
    from tests.integration.conftest import at_work

    opening = workplace / "opening"
    opening.write_text("1.0")
    job = training.job(program, validate=validated.validation("", every=13, opening=str(opening)))
    with at_work(nursery):
        return play(job, workplace / "validated-undisturbed")


@pytest.mark.slow
def test_it_comes_to_what_the_model_gives_in_one_process(
    calm: Played, program: ir.Program, undisturbed: Played
) -> None:
    assert list(calm.result.validations) == STEPS
    validation = validated.validation("")
    here = validate_here(
        evaluation_of(program, validation), validation.config(), graphft.read_weights(calm.result.model), "cpu"
    )
    assert here.pop("samples") == validated.RECORDS
    assert calm.result.validations[80] == here
    assert calm.result.validations[13]["loss"] > calm.result.validations[80]["loss"]
    model = training.network().eval()
    graphft.load_into(model, undisturbed.result.model)
    blobs = training.Blobs(validated.RECORDS)
    with torch.no_grad():
        loss, more = validated.with_scores(model, blobs.x, blobs.y)
    assert here["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert here["balanced"] == float(validated.balanced(more["best"], more["labels"]))


def validating(status: JobStatus) -> bool:
    return bool(status.validating) and status.step >= 13


def test_kills_do_not_change_a_digit(program: ir.Program, folder: Path, pace: Pace, calm: Played) -> None:
    slow = Pace(pace.file.with_suffix(".slow"))
    told = Told()
    acts = [
        Act(validating, kill("trainer", 0)),
        Act(at(20), kill("trainer", 1, 2)),
        Act(validating, kill("pserver", 0)),
        Act(validating, kill("trainer", 0, 1, 2)),
        Act(at(50), lambda supervisor: (slow.set(0.0), pace.set(0))),
    ]
    played = play(make(program, pace, slow), folder, acts, callbacks=[told])
    assert played.result.validations == calm.result.validations
    assert told.validations == list(calm.result.validations.items())
    assert all(torch.equal(calm.state[name], value) for name, value in played.state.items())
    assert not (folder / "entries").exists() or not any((folder / "entries").iterdir())


@pytest.mark.slow
def test_held_out_data_that_cannot_be_read_end_the_job(program: ir.Program, folder: Path) -> None:
    data = graphft.dataset(f"{training.__file__}:Blobs", {"records": 60, "broken": 31}, chunk_size=60)
    job = training.job(program, validate=graphft.Validation(data=data), max_failures=2, lease_ttl=3)
    with pytest.raises(GraphftError, match=r"the validation of step 20 cannot be made: (?s:.*)record 31 is damaged"):
        play(job, folder)


def test_the_steps_that_are_validated() -> None:
    config = validated.validation("", every=3).config()
    assert config.steps(Plan([10, 10], slots=2, batch_size=5, seed=0, passes=4)) == {3, 6, 8}
    each = validated.validation("").config()
    assert each.steps(Plan([10, 10], slots=2, batch_size=5, seed=0, passes=4)) == {2, 4, 6, 8}
    assert [r[2] for r in each.ranges] == [8, 1, 8, 1, 8, 1, 8]


def decisive(program: ir.Program, pace: Pace | None, slow: Pace | None = None) -> graphft.Job:
    """Its learning rate goes down, its best model is kept, and it ends early."""
    validation = validated.validation(
        slow.file if slow is not None else "",
        every=5,
        best="balanced",
        stop=graphft.EarlyStopping("loss", patience=2, min_delta=0.004),
        plateau=graphft.ReduceLROnPlateau("loss", factor=0.5, patience=0, threshold=0.05),
    )
    return training.job(program, pace=pace.file if pace is not None else None, validate=validation)


@pytest.mark.slow
def test_decisions_are_those_of_the_undisturbed_job(program: ir.Program, folder: Path, pace: Pace) -> None:
    plain = play(decisive(program, None), folder / "plain")
    assert plain.result.steps < plain.job.config.total_steps, "it ended early"
    scale = [e.text for e in plain.statuses[-1].events if "learning rates are" in e.text]
    assert scale
    acts = [
        Act(validating, kill("trainer", 0)),
        Act(validating, kill("pserver", 1)),
        Act(at(plain.result.steps - 12), kill("trainer", 0, 1, 2)),
        Act(validating, kill("pserver", 0, 1)),
    ]
    slow = Pace(pace.file.with_suffix(".slow"))
    slow.set(0.05)  # a validation is seen before it is over
    played = play(decisive(program, pace, slow), folder / "killed", acts)
    assert (played.result.steps, played.result.validations) == (plain.result.steps, plain.result.validations)
    here, there = graphft.read_weights(plain.result.model), graphft.read_weights(played.result.model)
    assert all(torch.equal(here[name], there[name]) for name in here)
    best, other = plain.result.best, played.result.best
    assert best is not None
    assert other is not None
    assert (best.step, best.value) == (other.step, other.value)
    assert best.value == max(row["balanced"] for row in plain.result.validations.values())
    kept, same = graphft.read_weights(best.model), graphft.read_weights(other.model)
    assert all(torch.equal(kept[name], same[name]) for name in kept)
    assert any(not torch.equal(kept[name], here[name]) for name in kept) or best.step == plain.result.steps
