"""Validation beside the steps, of real jobs: what it comes to does not depend on who dies, and each is told once."""

from __future__ import annotations

import csv
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
from graphft.runtime.launcher.launch import run_job
from graphft.transpiler.evaluation import evaluation_of
from graphft.transpiler.validation import MOST_OPEN
from tests.integration import training
from tests.integration.plays import Act, Pace, Played, Program, at, kill, play

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


def test_it_does_not_change_what_is_trained(calm: Played, undisturbed: Played) -> None:
    """Making the held-out Dataset seeds the global generators: it is made before the first step, on the main thread."""
    assert all(torch.equal(calm.state[name], value) for name, value in undisturbed.state.items())


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


def test_a_script_that_is_killed_tells_each_validation_once(folder: Path, pace: Pace, calm: Played) -> None:
    slow = Pace(pace.file.with_suffix(".slow"))
    slow.set(0.02)
    script = [Path(validated.__file__), pace.file, slow.file]
    job_dir = folder / "jobs/validated/runs/1"
    for step in (20, 55):
        run = Program(folder, *script)
        run.until(job_dir, lambda status, step=step: status.step >= step)
        run.kill()
    pace.set(0.0)
    slow.set(0.0)
    run = Program(folder, *script)
    assert run.wait() == 0, run.output
    assert "validations: 7" in run.output
    rows = list(csv.DictReader((job_dir / "steps-validation.csv").open()))
    found = {int(row.pop("step")): {name: float(value) for name, value in row.items()} for row in rows}
    assert found == calm.result.validations


def test_held_out_data_that_cannot_be_read_end_the_job(program: ir.Program, folder: Path) -> None:
    data = graphft.dataset(f"{training.__file__}:Blobs", {"records": 60, "broken": 31}, chunk_size=60)
    job = training.job(program, validate=graphft.Validation(data=data), max_failures=2, lease_ttl=3)
    with pytest.raises(GraphftError, match=r"the validation of step 20 cannot be made: (?s:.*)record 31 is damaged"):
        play(job, folder)


def test_a_reducer_that_fails_on_the_data_ends_the_job(program: ir.Program, folder: Path) -> None:
    """There is no class 3: only the data show it."""
    validation = graphft.Validation(
        data=graphft.dataset(f"{training.__file__}:Blobs", {"records": 60}, chunk_size=60),
        loss_fn=validated.with_scores,
        reduce={"picked": lambda best, labels: best.double()[labels + 1000].mean()},
    )
    job = training.job(program, validate=validation, passes=1)
    with pytest.raises(
        GraphftError, match=r"validation of step 20 cannot be made: what all records come to: (?s:.*)out of"
    ):
        play(job, folder)


@pytest.mark.parametrize("gone", [False, True])
def test_more_passes_keep_the_best_model(
    program: ir.Program, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gone: bool
) -> None:
    """The run goes on in another folder; the best is of the run before, and it is told where it is not there."""

    def job(passes: int) -> graphft.Job:
        validation = validated.validation("", best=graphft.Criterion("loss", "max"))  # the first is the highest
        return training.job(program, validate=validation, passes=passes)

    folder.mkdir()
    monkeypatch.chdir(folder)
    first = run_job(job(2), quiet=True)
    assert first.best is not None
    assert first.best.step == 20
    value = first.best.value
    if gone:
        first.best.model.unlink()
    more = run_job(job(3), quiet=True)
    assert more.job_dir != first.job_dir
    missing = "the model of step 20, the best one by loss, is MISSING from "
    told = [line for line in capsys.readouterr().err.splitlines() if missing in line]
    assert list(more.validations) == [20, 40, 60]
    if gone:
        assert told[0].startswith(f"{missing}jobs/blobs/runs/2/best"), "also where a worse one is kept since"
        return
    assert not told
    assert more.best is not None
    assert (more.best.step, more.best.value) == (20, value)


def test_an_error_of_the_storage_that_stays_ends_the_job(program: ir.Program, folder: Path) -> None:
    """Other records can be read, so it is not away."""
    data = graphft.dataset(f"{validated.__file__}:Truncated", {"records": 60}, chunk_size=20)
    job = training.job(program, validate=graphft.Validation(data=data), max_failures=1, lease_ttl=3, passes=1)
    with pytest.raises(GraphftError, match=r"the validation of step 20 cannot be made: (?s:.*)file 31 is truncated"):
        play(job, folder)


def test_a_training_dataset_may_draw_while_what_is_held_out_is_read(program: ir.Program, folder: Path) -> None:
    """Its reads seed the global generators: they are no draws of the other one."""
    noisy = graphft.dataset(f"{training.__file__}:NoisyBlobs", {}, chunk_size=training.CHUNK)
    options = {"trainers": 2, "pservers": 1, "ft": True, "batch_size": training.BATCH, "passes": 1, "name": "noisy"}
    job = graphft.transpile(program, chunks=noisy, validate=validated.validation("", every=3), **options)
    played = play(job, folder)
    assert len(played.result.validations) == len(job.config.validated)
    assert "validation-failed" not in played.events


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_entry_is_made_again(program: ir.Program, folder: Path, pace: Pace, calm: Played) -> None:
    slow = Pace(pace.file.with_suffix(".slow"))
    slow.set(0.3)  # the validation goes on for seconds behind its first range
    entries = folder / "entries"

    def some(status: JobStatus) -> bool:
        return 13 in status.validating and any(entries.glob("00000013.*/*.safetensors"))

    def damage(supervisor: Any) -> bool:
        files = list(entries.glob("00000013.*/*.safetensors"))
        for file in files:
            flip(file)
        slow.set(0.0)
        return bool(files)

    played = play(make(program, pace, slow), folder, [Act(some, damage)])
    assert "validation-failed" in played.events
    assert played.result.validations == calm.result.validations


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


def test_a_damaged_checkpoint_that_training_waits_at_is_made_again(
    program: ir.Program, folder: Path, pace: Pace
) -> None:
    """Nobody could validate it, and the next step would be waited for, for ever."""
    plain = play(decisive(program, None), folder / "plain")
    killed = folder / "killed"
    slow = Pace(pace.file.with_suffix(".slow"))

    def damage(supervisor: Any) -> None:
        assert kill("trainer", 0, 1, 2)(supervisor)
        for file in (killed / "checkpoints").glob("step-00000015.*/shard-0-*"):
            flip(file)
        slow.set(0.0)

    slow.set(0.2)  # a validation takes more than a second: it is seen before it is over, or goes slowly
    acts = [Act(lambda status: status.validating == [15], damage)]
    played = play(decisive(program, pace, slow), killed, acts)
    assert "damaged-checkpoint" in played.events
    assert (played.result.steps, played.result.validations) == (plain.result.steps, plain.result.validations)


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


def test_a_held_out_batch_that_hangs_ends_its_process_and_is_tried_again(
    program: ir.Program, folder: Path, hangs: Path, calm: Played
) -> None:
    (hangs / "once").touch()
    blobs = {"records": validated.RECORDS, "hangs": str(hangs)}
    data = graphft.dataset(f"{training.__file__}:Blobs", blobs, chunk_size=validated.CHUNK)
    validation = graphft.Validation(data=data, batch_size=validated.BATCH, every=13)
    played = play(training.job(program, validate=validation, chunk_timeout=10.0, lease_ttl=15), folder)
    assert "hung" in played.events
    assert [row["loss"] for row in played.result.validations.values()] == [
        row["loss"] for row in calm.result.validations.values()
    ]
    assert sum(played.result.failures.values()) == 1


def test_training_waits_when_too_many_validations_are_not_over(program: ir.Program, folder: Path) -> None:
    slow = Pace(folder.with_suffix(".slow"))
    slow.set(2.0)  # none is over before the job has come to the last of those that may be open
    blobs = training.Blobs()
    arrays = graphft.arrays(x=blobs.x, y=blobs.y, chunk_size=training.CHUNK)  # two Datasets are read in turn
    acts = [
        Act(lambda status: len(status.validating) >= MOST_OPEN, lambda supervisor: None),
        Act(lambda status: status.step >= 52, lambda supervisor: slow.set(0.0)),
    ]
    played = play(make(program, None, slow, data=arrays), folder, acts)
    most = max(len(status.validating) for status in played.statuses)
    assert most == MOST_OPEN
    assert len(played.result.validations) == len(STEPS)
