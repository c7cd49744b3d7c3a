"""Which folder a run is in, what its launcher says of it, and what `resume` and `fresh` refuse."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.saved_step import saved_step
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.coordination.job_storage import publish
from graphft.runtime.launcher import job_folder
from graphft.runtime.launcher.job_folder import choose_directory, open_folder, saved_folder
from graphft.runtime.launcher.launch import run_job
from graphft.runtime.launcher.options import choose_options
from graphft.runtime.launcher.process_ends import note_saved
from graphft.transpiler import Job, read_record


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("GRAPHFT_") and n != "GRAPHFT_TEST_SESSION"]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def folder(path: str, job: Job | None = None, complete: bool = False) -> None:
    if job is None:
        Path(path).mkdir(parents=True)
        (Path(path) / "file").touch()
    else:
        job.save(path)
    if complete:
        (Path(path) / "model.safetensors").touch()


def test_a_default_folder_is_new_or_an_unfinished_run_of_the_same_job(job: Job) -> None:
    name = job.config.name
    assert choose_directory(job)[1] == Path("jobs", name)
    folder(f"jobs/{name}", Job.make(job.source, job.config.replace(seed=1)))
    assert choose_directory(job)[1] == Path("jobs", f"{name}-2")
    folder(f"jobs/{name}-2", job, complete=True)
    folder(f"jobs/{name}-3")
    Path(f"jobs/{name}-4").write_text("a file")
    assert choose_directory(job)[1] == Path("jobs", f"{name}-5")
    folder(f"jobs/{name}-5", job)
    assert choose_directory(job)[1] == Path("jobs", f"{name}-5"), "an unfinished run is gone on with"


def test_scripts_that_start_at_once_take_folders_of_their_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep: the folder that is chosen may be another's a moment later."""
    name, save = job.config.name, Job.save

    def be_late(this: Job, path: Any, *more: Any) -> None:
        monkeypatch.setattr(Job, "save", save)
        folder(str(path), Job.make(job.source, job.config.replace(seed=1)))
        save(this, path, *more)

    monkeypatch.setattr(Job, "save", be_late)
    with pytest.raises(SystemExit):
        run_job(job, save_only=True)
    assert read_record(Path(f"jobs/{name}-2")).run_id == job.run_id


def test_an_option_that_is_none_is_not_given(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """`job.run(job_dir=os.environ.get(...))` under `graphft launch --save-only --job DIR`."""
    monkeypatch.setenv("GRAPHFT_LAUNCH", '{"job_dir": "wanted", "save_only": true}')
    with pytest.raises(SystemExit):
        run_job(job, job_dir=None, callbacks=None)
    assert Path("wanted/job.json").exists()


def test_a_run_that_has_begun_does_not_change_its_exactness_in_silence(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.save("begun")
    for exact, said in ((True, ""), (False, 'goes on as it began, with exact=True; to change that: "exact": false')):
        caplog.clear()
        with pytest.raises(SystemExit):
            run_job(Job.make(job.source, job.config.replace(exact=exact)), job_dir="begun", save_only=True)
        assert caplog.text.count("goes on as it began") == bool(said)
        assert said in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("other", "wanted differs in: seed 1 -> 0"),
        ("complete", "wanted is complete"),
        ("files", "something else"),
        ("list", "something else"),
    ],
)
def test_a_wanted_folder_that_is_taken(job: Job, content: str, message: str) -> None:
    other = Job.make(job.source, job.config.replace(seed=1))
    folder("wanted", {"other": other, "complete": job}.get(content), complete=content == "complete")
    if content == "list":
        Path("wanted/job.json").write_text("[]")
    with pytest.raises(GraphftError, match=message):
        choose_directory(job, "wanted")


def test_a_wanted_folder_that_is_free(job: Job) -> None:
    assert choose_directory(job, "wanted")[1] == Path("wanted")
    Path("wanted").mkdir()
    assert choose_directory(job, "wanted")[1] == Path("wanted")
    folder("wanted", job)
    assert choose_directory(job, "wanted")[1] == Path("wanted")


def test_a_wanted_folder_whose_storage_is_taken_is_no_copy_of_it(job: Job, tmp_path: Path) -> None:
    """What was refused left the other run's folder, as one more run of it; and no other folder would have helped."""
    url = f"file://{tmp_path}/storage"
    stored = Job.make(job.source, job.config.replace(storage=url, passes=2))
    stored.save("first")
    publish(Path("first"))
    begin(Path("first"))
    (tmp_path / "storage" / "checkpoints" / "step-00000001.g0").mkdir(parents=True)
    other = Job.make(job.source, job.config.replace(storage=url, seed=1))
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    for wanted in ("second", "empty", "link"):
        with pytest.raises(GraphftError, match=re.escape(f"{url} holds job")) as refused:
            choose_directory(other, wanted)
        assert f"graphft launch --job {url} goes on with it" in str(refused.value)
        assert "choose another storage" in str(refused.value)
    assert not Path("second").exists()
    assert not list(Path("empty").iterdir())
    assert choose_directory(stored, "link")[1] == Path("link")
    assert read_record(Path("empty")).run_id == stored.run_id
    Path("new").mkdir()
    Path("other link").symlink_to("new")
    job.save("other link")
    assert read_record(Path("new")).run_id == job.run_id


@pytest.mark.parametrize("read", [True, False])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_with_other_pservers(
    job: Job, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(f"jobs/{job.config.name}", job)
    begin(Path("jobs", job.config.name))
    note_saved(Path("jobs", job.config.name), 2)
    if not read:
        monkeypatch.setattr(job_folder, "saved_step", lambda *_: None)
    more = {"trainers": 2, "pservers": 1, "batch_size": 4, "slice_unit": 64, "min_block": 64, "ft": True}
    other = graphft.transpile(job.source, chunks=job.config.data, **more)
    with pytest.raises(GraphftError, match="are gone, or damaged" if read else "cannot be read now"):
        open_folder(other)
    assert not Path(f"jobs/{job.config.name}-2").exists()
    if read:
        assert open_folder(other, fresh=True).path == Path(f"jobs/{job.config.name}-2")


def variant(job: Job, **changes: Any) -> Job:
    """The job that the script makes when it is run again, `changes` being what was corrected: `data`, or the initial
    values of variables by name."""
    source = job.source.clone()
    source.values = {**source.values, **{n: v for n, v in changes.items() if n != "data"}}
    return Job.make(source, job.config.replace(data=changes.get("data", job.config.data)))


def test_a_script_that_is_run_again_finds_its_run_and_a_corrected_one_does_not() -> None:
    """The same programs and options, but other data, initial values, frozen values or constants."""
    program = frozen_linear()
    x, y = torch.arange(160.0).reshape(8, 20), torch.zeros(8, 1)
    job = graphft.transpile(program, chunks=graphft.arrays(chunk_size=8, x=x, y=y), batch_size=4, ft=True, name="lin")
    _, path, _ = choose_directory(job)
    job.save(path)
    run_id = Job.load(path).run_id
    assert choose_directory(variant(job))[1] == path
    assert Job.load(path).run_id == run_id == job.run_id != variant(job).run_id
    corrected = {"data column y": {"data": graphft.arrays(chunk_size=8, x=x, y=y + 1)}}
    for name, value in program.values.items():
        if value.numel() and value.is_floating_point():
            told = "a constant of the script, float32[1]" if name == "const" else name
            corrected[f"initial value of {told}"] = {name: value + 1}
    assert len(corrected) >= 3
    for what, change in corrected.items():
        other = variant(job, **change)
        assert other.hash == job.hash, "programs and options are the same"
        _, found, passed = choose_directory(other)
        assert (found, [p.text for p in passed]) == (Path("jobs/lin-2"), [f"jobs/lin differs in: {what}"])
        with pytest.raises(GraphftError, match=f"holds another job, which differs in: {re.escape(what)}"):
            other.save(path)


def frozen_linear() -> graphft.Program:
    model = torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)

    def loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) + torch.tensor([0.5]) - y).square().mean()

    program = graphft.build(model, loss, inputs={"x": (None, 20), "y": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    return program


# -- what is said -----------------------------------------------------------------------------------------------------


def begin(path: Path, step: int = 0) -> None:
    """What a launcher leaves in a folder, and a checkpoint."""
    (path / "checkpoints").mkdir()
    if step:
        store = CheckpointStore(path / "checkpoints")
        parts = tuple(store.write_part(0, step, shard, 2, {"w": torch.zeros(1)}) for shard in (0, 1))
        store.write_manifest(Manifest(0, step, "run", parts))


def said(job: Job, **options: Any) -> str:
    """The line of a launcher that runs the job now."""
    return open_folder(job, **options).describe(job.config)


def test_the_line_says_what_is_run(job: Job) -> None:
    name, steps = job.config.name, job.config.total_steps
    first = Path("jobs", name)
    assert said(job) == f"new run in {first}"
    assert said(job) == f"new run in {first}", "it was saved, and never begun"
    begin(first)
    assert said(job) == f"resuming {first} at step 0 of {steps} (job unchanged)"
    begin_at_three = CheckpointStore(first / "checkpoints")
    part = begin_at_three.write_part(1, 3, 0, 1, {"w": torch.zeros(1)})
    begin_at_three.write_manifest(Manifest(1, 3, "run", (part,)))
    assert said(job) == f"resuming {first} at step 3 of {steps} (job unchanged)"
    other = Job.make(job.source, job.config.replace(batch_size=8, passes=2))
    left = f"(graphft launch --job {first} goes on with it)"
    changed = f"{first} differs in: batch_size 4 -> 8, passes 1 -> 2 {left}"
    assert said(other) == f"{changed}; new run in {first}-2"
    (first / "model.safetensors").touch()
    assert said(job) == f"{first} is complete; 1 other folder holds another run; new run in {first}-3"
    for n in (2, 3):
        (Path(f"{first}-{n}") / "model.safetensors").touch()
    assert said(job) == f"{first} is complete; 2 other folders hold other runs; new run in {first}-4"
    near = Job.make(job.source, job.config.replace(batch_size=8))
    assert said(near).startswith(f"{first} differs in: batch_size 4 -> 8; 3 other folders"), "the nearest one"


def test_without_fault_tolerance_the_line_promises_no_resumption(job: Job) -> None:
    plain = Job.make(job.source, job.config.replace(ft=False))
    assert said(plain) == f"new run in jobs/{plain.config.name}"
    begin(Path("jobs", plain.config.name))
    assert said(plain).startswith(f"beginning jobs/{plain.config.name} anew (job unchanged): without fault tolerance")


def test_resume_takes_an_unfinished_run_of_this_job_or_refuses(job: Job) -> None:
    first = Path("jobs", job.config.name)
    with pytest.raises(
        GraphftError, match=f"no unfinished run of this job to resume: {first} does not exist"
    ) as caught:
        said(job, resume=True)
    assert caught.value.rule == "nothing-to-resume"
    assert not first.exists(), "nothing is left of it"
    job.save(first)
    with pytest.raises(GraphftError, match=f"{first} was saved, but never begun"):
        said(job, resume=True)
    begin(first, 2)
    assert said(job, resume=True).startswith(f"resuming {first} at step 2")
    other = Job.make(job.source, job.config.replace(seed=3))
    with pytest.raises(GraphftError, match=f"{first} differs in: seed 0 -> 3 .*{first}-2 does not exist"):
        said(other, resume=True)
    with pytest.raises(GraphftError, match=f"cannot resume: {first} differs in: seed 0 -> 3"):
        said(other, resume=True, wanted=str(first))


def test_fresh_passes_by_an_unfinished_run(job: Job) -> None:
    first = Path("jobs", job.config.name)
    job.save(first)
    assert said(job, fresh=True) == f"new run in {first}", "nothing was begun there"
    begin(first, 2)
    held = f"{first} holds an unfinished run, at step 2 of {job.config.total_steps}"
    assert said(job, fresh=True) == f"{held}; new run in {first}-2"
    with pytest.raises(GraphftError, match=held):
        said(job, fresh=True, wanted=str(first))


def test_a_saved_job_without_its_script_is_resumed_or_begun(job: Job, saved: Path) -> None:
    assert saved_folder(saved, resume=False, fresh=False).describe(job.config) == f"new run in {saved}"
    for options, message in (({"fresh": True}, "fresh is for a script"), ({"resume": True}, "never begun")):
        with pytest.raises(GraphftError, match=message):
            saved_folder(saved, **{"fresh": False, "resume": False, **options})
    begin(saved, 1)
    line = saved_folder(saved, resume=True, fresh=False).describe(job.config)
    assert line == f"resuming {saved} at step 1 of {job.config.total_steps}"
    (saved / "model.safetensors").touch()
    with pytest.raises(GraphftError, match="is complete"):
        saved_folder(saved, resume=True, fresh=False)


def test_an_async_run_is_as_far_as_its_last_shard(job: Job) -> None:
    alone = Job.make(job.source, job.config.replace(sync=False))
    folder = Path("jobs", alone.config.name)
    alone.save(folder)
    for shard, step in ((0, 5), (1, 3)):
        store = CheckpointStore(folder / "checkpoints" / f"shard-{shard}")
        part = store.write_part(0, step, shard, 2, {"w": torch.zeros(1)})
        store.write_manifest(Manifest(0, step, "run", (part,)))
    assert saved_step(folder, alone.config) == 3


# -- the command line and the script ----------------------------------------------------------------------------------


def test_the_command_line_counts_and_says_so(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHFT_LAUNCH", '{"job_dir": "wanted", "save_only": true, "trainers": 3}')
    with pytest.raises(SystemExit):
        run_job(job, job_dir="scripts", trainers=3, pservers=1)
    assert Path("wanted/job.json").exists()
    assert not Path("scripts").exists()
    assert capsys.readouterr().err == (
        "job_dir='wanted' of the command line counts, not job_dir='scripts' of the script\n"
    )
    chosen = choose_options(None, {"trainers": 2, "pservers": 1})
    assert (chosen.trainers, chosen.pservers) == (3, 1)


def test_resume_and_fresh_exclude_each_other(job: Job) -> None:
    with pytest.raises(GraphftError, match="exclude each other"):
        run_job(job, resume=True, fresh=True)
    assert not Path("jobs").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [("fresh", "fresh cannot hold for a role"), ("resume", "there is nothing to resume: elsewhere holds no job")],
)
def test_a_role_says_what_cannot_hold(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    monkeypatch.setenv("GRAPHFT_ROLE", "trainer")
    monkeypatch.setenv("GRAPHFT_JOB_DIR", "elsewhere")
    with pytest.raises(SystemExit) as ended:
        run_job(job, **{option: True})
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not Path("elsewhere").exists()
