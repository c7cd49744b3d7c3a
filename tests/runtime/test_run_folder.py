"""A job is run in the newest run or the next one; a name means a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.coordination.runs import find_folder, find_run, link_newest, run_folders, weights_source
from graphft.runtime.launcher import run_folder
from graphft.runtime.launcher.launch import run_job
from graphft.runtime.launcher.options import choose_options
from graphft.runtime.launcher.process_ends import note_saved
from graphft.runtime.launcher.run_folder import RunFolder, open_run, run_of, saved_run
from graphft.transpiler.job import Job
from graphft.transpiler.record import read_record

pytestmark = pytest.mark.usefixtures("own_folder")
EMPTY_MODEL = (2).to_bytes(8, "little") + b"{}"


def again(job: Job, **options: Any) -> Job:
    """The job that its script makes when it is run again, with other options perhaps."""
    return Job.make(job.source, job.config.replace(**options))


def run(job: Job, number: int) -> Path:
    return Path("jobs", job.config.name, "runs", str(number))


def complete(path: Path) -> None:
    (path / "model.safetensors").write_bytes(EMPTY_MODEL)


def begin(path: Path, step: int = 0) -> None:
    (path / "checkpoints").mkdir()
    if step:
        store = CheckpointStore(path / "checkpoints")
        parts = tuple(store.write_part(0, step, shard, 2, {"w": torch.zeros(1)}) for shard in (0, 1))
        store.write_manifest(Manifest(0, step, "run", parts))


def said(job: Job, **options: Any) -> str:
    """The line of a launcher that runs the job now."""
    return open_run(job, **options).describe(job.config)


# -- one rule ---------------------------------------------------------------------------------------------------------


def test_the_newest_run_goes_on_or_is_followed_by_the_next_one(job: Job) -> None:
    first, second, third, steps = run(job, 1), run(job, 2), run(job, 3), job.config.total_steps
    assert said(job) == f"new run in {first}"
    assert said(again(job)) == f"new run in {first}", "it was saved, and never begun"
    begin(first, 3)
    assert said(again(job)) == f"resuming {first} at step 3 of {steps}"
    other = again(job, batch_size=8)
    assert said(other) == f"{first} differs in: batch_size 4 -> 8; new run in {second}"
    begin(second)
    assert said(again(job)) == f"{second} differs in: batch_size 8 -> 4; new run in {third}", "only the newest counts"
    begin(third)
    complete(third)
    found = open_run(again(job))
    assert (found.path, found.complete) == (third, True)
    assert found.describe(job.config).startswith(f"{third} is complete, and its result is returned")
    assert said(again(job), fresh=True) == f"{third} is complete; new run in {run(job, 4)}"


def test_what_nobody_draws_is_a_difference_without_a_seed_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphft.transpiler.job.drawn_without_seed", lambda: True)

    def weighted(weight: float, init_from: dict[str, torch.Tensor] | None = None) -> Job:
        classes = torch.tensor([1.0, weight])
        model = torch.nn.Linear(8, 2)
        program = graphft.build(
            model, lambda m, x, y: (m(x) * classes).mean() + y.mean(), {"x": (None, 8), "y": (None,)}
        )
        graphft.minimize(program, graphft.SGD(lr=0.1))
        data = graphft.arrays(x=torch.zeros(8, 8), y=torch.zeros(8), chunk_size=4)
        return graphft.transpile(program, data=data, batch_size=2, name="weighted", ft=True, init_from=init_from)

    def finished(job: Job) -> RunFolder:
        found = open_run(job)
        complete(found.path)
        return found

    assert finished(weighted(2.0)).path.name == "1"
    assert finished(weighted(2.0)).path.name == "1", "its drawn weights are others"
    assert "a constant of the script" in finished(weighted(3.0)).before
    state = {"weight": torch.zeros(2, 8), "bias": torch.zeros(2)}
    assert finished(weighted(3.0, state)).path.name == "3"
    assert finished(weighted(3.0, state)).path.name == "3"
    assert finished(weighted(3.0, state | {"bias": torch.ones(2)})).path.name == "4"


def test_scripts_that_start_at_once_take_runs_of_their_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Job.save

    def be_late(this: Job, path: Any, *more: Any) -> None:
        monkeypatch.setattr(Job, "save", save)
        again(job, seed=1).save(path)
        save(this, path, *more)

    monkeypatch.setattr(Job, "save", be_late)
    with pytest.raises(SystemExit):
        run_job(job, save_only=True)
    assert read_record(run(job, 2)).run_id == job.run_id


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_with_other_pservers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.save(run(job, 1))
    begin(run(job, 1))
    note_saved(run(job, 1), 2)
    more = {"trainers": 2, "pservers": 1, "batch_size": 4, "slice_unit": 64, "min_block": 64, "ft": True}
    other = graphft.transpile(job.source, data=job.config.data, **more)
    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "saved_step", lambda *_: None)
        with pytest.raises(GraphftError, match="cannot be read now"):
            open_run(other)
    with pytest.raises(GraphftError, match="are gone, or damaged"):
        open_run(other)
    assert not run(job, 2).exists()


# -- a folder that is wanted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["other", "files", "list", "begun"])
def test_a_wanted_folder_that_is_taken(job: Job, content: str) -> None:
    if content == "files":
        Path("wanted").mkdir()
        Path("wanted/file").touch()
    else:
        again(job, seed=1 if content == "other" else 0).save("wanted")
        begin(Path("wanted"))
    if content == "list":
        Path("wanted/job.json").write_text("[]")
    with pytest.raises(GraphftError, match=r"^error\[job-directory\]"):
        open_run(job, "wanted", fresh=content == "begun")


def test_a_wanted_folder_that_is_free_or_holds_the_job(job: Job) -> None:
    for _ in range(2):
        assert open_run(job, "wanted").path == Path("wanted")
    complete(Path("wanted"))
    assert open_run(again(job), "wanted").complete
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    job.save("link")
    assert read_record(Path("empty")).run_id == job.run_id


def test_a_saved_job_without_its_script_is_resumed_or_begun(job: Job, saved: Path) -> None:
    assert saved_run(saved, fresh=False).describe(job.config) == f"new run in {saved}"
    with pytest.raises(GraphftError, match=r"^error\[option\]"):
        saved_run(saved, fresh=True)
    begin(saved, 1)
    line = saved_run(saved, fresh=False).describe(job.config)
    assert line == f"resuming {saved} at step 1 of {job.config.total_steps}"


# -- which run a name means -------------------------------------------------------------------------------------------


def test_a_name_means_the_newest_run_and_for_predictions_the_newest_complete_one(job: Job) -> None:
    name, top = job.config.name, Path("jobs", job.config.name)
    with pytest.raises(GraphftError, match=r"^error\[unknown-job\]"):
        find_run(name)
    for number in (1, 2, 3):
        again(job, seed=number).save(run(job, number))
        link_newest(run(job, number))
        if number < 3:
            complete(run(job, number))
            link_newest(run(job, number))
    for given in (name, str(top), f"{top}/"):
        assert (find_folder(given), find_folder(given, complete=True)) == (run(job, 3), run(job, 2))
        assert Path(weights_source(given)) == run(job, 2)
    assert find_folder(run(job, 1), complete=True) == run(job, 1)
    assert os.readlink(top / "latest") == "runs/3"
    assert os.readlink(top / "model.safetensors") == "runs/2/model.safetensors"
    assert list(run_folders()) == [run(job, n) for n in (1, 2, 3)]
    (run(job, 2) / "model.safetensors").unlink()
    (run(job, 1) / "model.safetensors").unlink()
    assert find_folder(name, complete=True) == run(job, 3), "none is complete"
    assert weights_source("elsewhere") == "elsewhere"


def test_runs_of_a_storage_have_the_same_numbers_on_each_machine(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/store/lin"
    for machine, seed, number in (("one", 1, 1), ("two", 1, 1), ("two", 2, 2), ("three", 2, 2), ("one", 2, 2)):
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / machine)
        found = open_run(again(job, storage=url, seed=seed, name="lin"))
        assert found.path == Path("jobs", "lin", "runs", str(number))
        assert read_record(found.path).config.storage == f"{url}/runs/{number}"
    with pytest.raises(GraphftError, match="has the runs of job lin, and this one is other"):
        open_run(again(job, storage=url, seed=2, name="other"))
    assert not Path("jobs/other/runs/2").exists()
    assert find_run(url) == f"{url}/runs/2"
    complete(tmp_path / "store" / "lin" / "runs" / "1")
    assert find_run(url, complete=True) == f"{url}/runs/1"
    assert find_folder(url) == Path("jobs/lin/runs/2")


def test_the_newest_complete_run_of_the_very_job_predicts(job: Job) -> None:
    with pytest.raises(GraphftError, match=r"^error\[unknown-job\]"):
        run_of(job)
    again(job, seed=9).save(run(job, 1))
    with pytest.raises(GraphftError, match="differs in: seed 9 -> 0"):
        run_of(job)
    for number in (2, 3):
        again(job).save(run(job, number))
    assert run_of(job) == str(run(job, 3))
    complete(run(job, 2))
    assert run_of(job) == str(run(job, 2))


# -- the command line and the script ----------------------------------------------------------------------------------


def test_the_command_line_counts_and_says_so(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHFT_LAUNCH", '{"job_dir": "wanted", "save_only": true, "trainers": 3}')
    with pytest.raises(SystemExit):
        run_job(job, job_dir="scripts", trainers=3, pservers=1, callbacks=None)
    assert Path("wanted/job.json").exists()
    assert not Path("scripts").exists()
    assert capsys.readouterr().err == (
        "job_dir='wanted' of the command line counts, not job_dir='scripts' of the script\n"
    )
    chosen = choose_options(None, {"trainers": 2, "pservers": 1, "page": None})
    assert (chosen.trainers, chosen.pservers) == (3, 1)
