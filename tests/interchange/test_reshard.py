"""A sync job goes on with another number of pservers: the same bits."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphft
from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.reshard import carry_over, reshard
from graphft.runtime.checkpoint.store import CheckpointStore, checkpoints_of
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.launcher.result import Result
from graphft.runtime.launcher.run_folder import open_run
from graphft.transpiler.job import Job
from tests.interchange.test_job_state import make_job

pytestmark = pytest.mark.usefixtures("forks")
STEP = 5
plain = functools.cache(make_job)


def states(job: Job, seed: int = 3) -> list[dict[str, Tensor]]:
    """Values that shards may hold, other than at the start."""
    generator = torch.Generator().manual_seed(seed)
    one = plain(1)  # the same variables whole, so that it does not depend on the number of shards
    drawn = {
        n: torch.randn(t.shape, generator=generator) if t.is_floating_point() and t.dim() else t + STEP
        for n, t in sorted(one.pserver_program(0).values.items())
    }
    return reshard(one, [drawn], job)


def begin(folder: Path, job: Job, values: list[dict[str, Tensor]], step: int = STEP) -> None:
    """A run that was interrupted at a step."""
    job.save(folder)
    begin_in(folder, values, step)


def begin_in(folder: Path, values: list[dict[str, Tensor]], step: int = STEP) -> None:
    job, store = Job.load(folder), checkpoints_of(folder)
    parts = tuple(store.write_part(0, step, i, len(values), each) for i, each in enumerate(values))
    store.write_manifest(Manifest(0, step, job.run_id, parts, {"discarded": {}}))


def held(folder: Path) -> tuple[int, list[dict[str, Tensor]]]:
    job, store = Job.load(folder), CheckpointStore(folder / "checkpoints")
    (manifest,) = store.manifests()
    assert manifest.run == job.run_id
    return manifest.step, [store.read_part(manifest, i)[0] for i in range(job.config.pservers)]


def is_same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return [values.keys() for values in one] == [values.keys() for values in other] and all(
        torch.equal(mine[n], theirs[n]) for mine, theirs in zip(one, other, strict=True) for n in mine
    )


@pytest.mark.parametrize("way", [(1, 5, 3), (2, 4, 1)])
def test_any_number_and_back(way: tuple[int, ...]) -> None:
    jobs = [plain(n) for n in (*way, way[0])]
    first = values = states(jobs[0])
    for old, new in itertools.pairwise(jobs):
        values = reshard(old, values, new)
        assert is_same(values, states(new))
    assert is_same(values, first)


FIRST, SECOND, THIRD = (Path("jobs", "lin", "runs", number) for number in "123")


def line_of(job: Job, **options: bool) -> str:
    return open_run(job, **options).describe(job.config)


def test_a_run_goes_on_with_other_pservers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(FIRST, job := make_job(2, name="lin"), states(job))
    (FIRST / "metrics.rows").write_text("1")
    other = make_job(3, name="lin")
    line = line_of(other)
    assert line.startswith(f"{FIRST} differs in: pservers 2 -> 3; going on from step 5 of 8 of {FIRST}, with "), line
    assert line.endswith(f" 3 pservers, in {SECOND}")
    assert (held(SECOND)[0], is_same(held(SECOND)[1], states(other))) == (5, True)
    assert (SECOND / "metrics.rows").read_text() == "1"
    assert line_of(make_job(3, name="lin")) == f"resuming {SECOND} at step 5 of 8"
    back = make_job(2, name="lin")
    assert line_of(back).endswith(f" 2 pservers, in {THIRD}")
    assert is_same(held(THIRD)[1], states(back))
    (THIRD / "model.safetensors").touch()
    assert open_run(make_job(4, name="lin")).complete, "other pservers are no difference"


def test_without_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(FIRST, job := make_job(2, name="lin"), states(job))
    (part,) = FIRST.glob("checkpoints/*/shard-0-*")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(GraphftError, match="is not what was written"):
        open_run(make_job(3, name="lin"))
    assert not SECOND.exists(), "nothing is begun from nothing without a word"


def test_what_a_shard_holds_is_checked(tmp_path: Path) -> None:
    old, new = make_job(2), make_job(3)
    values = states(old)
    del values[1]["global_step"]
    with pytest.raises(GraphftError, match="shard 1 does not hold the same as shard 0"):
        reshard(old, values, new)
    old.save(tmp_path / "old")
    assert carry_over(tmp_path / "old", new, tmp_path / "new") is None
    assert not (tmp_path / "new").exists()


class Steps:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        assert metrics["discarded"] == 0
        self.epochs.append(epoch)


@pytest.mark.slow
def test_more_passes_give_the_bits_of_a_job_that_had_them_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A complete run goes on, then one that was interrupted, on other pservers."""
    monkeypatch.chdir(tmp_path)
    options, told = {"name": "lin", "checkpoint_every": 1, "keep_checkpoints": 99}, Steps()

    def run(job: Job) -> Result:
        return job.run(quiet=True, callbacks=[told])

    undisturbed = make_job(2, epochs=5, name="whole").run(quiet=True)
    whole = graphft.read_weights(undisturbed.model)
    run(make_job(2, **options))
    assert run(make_job(2, epochs=3, **options)).steps == 12
    line = f"{FIRST} differs in: epochs 2 -> 3; going on from step 8 of 12 of {FIRST}, with 3 epochs, 2 pservers, in "
    assert f"{line}{SECOND}\n" in capfd.readouterr().err
    assert look_at(FIRST).state == "complete"
    _cut_off(SECOND, 11)
    result = run(make_job(3, epochs=5, **options))
    assert result.job_dir == THIRD
    assert result.metrics == undisturbed.metrics, "those of the steps before are its own, too"
    assert (told.steps, told.epochs) == ([*range(20)], [1, 2, 3, 4, 5])
    assert re.search(
        rf"from step \d+ of 20 of {SECOND}, with 5 epochs, 3 pservers, in {THIRD}\n", capfd.readouterr().err
    )
    end = graphft.read_weights(result.model)
    assert all(torch.equal(end[n], whole[n]) for n in whole)


def _cut_off(folder: Path, step: int) -> None:
    """As if it had been interrupted there; where that step's checkpoint was passed over, behind the first."""
    (folder / "model.safetensors").unlink()
    steps = {path: int(path.name.split("-")[1].split(".")[0]) for path in (folder / "checkpoints").iterdir()}
    for path, of in steps.items():
        if of > max(step, min(steps.values())):
            shutil.rmtree(path)
    shutil.rmtree(folder / "etcd", ignore_errors=True)
