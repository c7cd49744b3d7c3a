"""A sync job goes on with another number of pservers: the same bits."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor

import graphft
from graphft.callbacks import CSVLogger
from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.described import is_loaded
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.reshard import carry_over, layout_differences, reshard
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.checkpoint.stored_checkpoints import checkpoints_of
from graphft.runtime.cli import main
from graphft.runtime.fs import file_system
from graphft.runtime.launcher import launch_saved
from graphft.runtime.launcher.carried_rows import carry_rows
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.launcher.job_folder import CONTINUED, open_folder
from graphft.runtime.launcher.process_ends import note_saved
from graphft.runtime.launcher.result import Result
from graphft.runtime.process import metric_rows
from graphft.transpiler import Job
from tests.interchange.test_job_state import make_job
from tests.support.s3_server import s3_server

STEP = 5


plain = functools.cache(make_job)


def states(job: Job, seed: int = 3) -> list[dict[str, Tensor]]:
    """What shards may hold, other than at the start."""
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
    store.write_manifest(Manifest(0, step, job.run_id, parts, {"left_out": {}}))


def held(folder: Path) -> tuple[int, list[dict[str, Tensor]]]:
    job, store = Job.load(folder), CheckpointStore(folder / "checkpoints")
    (manifest,) = store.manifests()
    assert manifest.run == job.run_id
    return manifest.step, [store.read_part(manifest, i)[0] for i in range(job.config.pservers)]


def is_same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return [values.keys() for values in one] == [values.keys() for values in other] and all(
        torch.equal(mine[n], theirs[n]) for mine, theirs in zip(one, other, strict=True) for n in mine
    )


@pytest.mark.parametrize("way", [(1, 5, 3), (2, 4, 1), (3, 1, 5)])
def test_any_number_and_back(way: tuple[int, ...]) -> None:
    jobs = [plain(n) for n in (*way, way[0])]
    first = values = states(jobs[0])
    for old, new in itertools.pairwise(jobs):
        values = reshard(old, values, new)
        assert is_same(values, states(new))
    assert is_same(values, first)


def test_a_run_is_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"name": "lin"}
    begin(tmp_path / "jobs" / "lin", job := make_job(2, **named), states(job))
    other = make_job(3, **named)
    line = open_folder(other).describe(other.config)
    assert line.startswith("jobs/lin differs in: pservers 2 -> 3 (graphft launch --job jobs/lin goes on with it); ")
    assert line.endswith("; going on from step 5 of 8 of jobs/lin, carried over to 3 pservers, in jobs/lin-2")
    assert (held(Path("jobs/lin-2"))[0], is_same(held(Path("jobs/lin-2"))[1], states(other))) == (5, True)
    again = make_job(3, **named)
    Path("jobs/lin-2/callbacks.json").write_text("{")
    Path("jobs/lin-2/metrics/trainer-0-a.jsonl").mkdir()
    assert "resuming jobs/lin-2 at step 5 of 8 (job unchanged)" in open_folder(again).describe(again.config)
    back = make_job(2, **named)
    line = open_folder(back).describe(back.config)
    told = capfd.readouterr().err
    assert "jobs/lin-2/callbacks.json does NOT go along: jobs/lin-2/callbacks.json does not say what" in told
    assert "jobs/lin-2/metrics/trainer-0-a.jsonl does NOT go along: " in told
    assert line.endswith("of 8 of jobs/lin-2, carried over to 2 pservers, in jobs/lin-3"), line
    assert "jobs/lin went on in " in line or "1 other folder" in line
    assert is_same(held(Path("jobs/lin-3"))[1], states(back))
    shutil.rmtree("jobs/lin-3")
    shutil.rmtree("jobs/lin-2")
    assert "resuming jobs/lin at step 5 of 8" in open_folder(back).describe(back.config), "what it went on in is gone"


def test_a_run_that_went_on_and_is_complete_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third number of pservers went on from where the first had been left, as if there were no second."""
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "jobs" / "lin", job := make_job(2, name="lin"), states(job))
    assert "carried over to 3 pservers" in open_folder(other := make_job(3, name="lin")).describe(other.config)
    (tmp_path / "jobs" / "lin-2" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for pservers in (2, 4):
        job = make_job(pservers, name="lin")
        line = open_folder(job, fresh=False).describe(job.config)
        assert "; new run in jobs/lin-" in line, line
        assert "carried over" not in line
        if pservers == 2:
            assert "jobs/lin went on in jobs/lin-2, which is complete" in line, line


def test_what_a_full_disk_does_not_take_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def half(path: Path, target: Path, before: int) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    source, new = tmp_path / "source", tmp_path / "new"
    for path, data in ("metrics/trainer-0-a.every1.000000.rows", "rows"), ("csv-logger.json", '["log.csv"]'):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(data)
    new.mkdir()
    monkeypatch.setattr(metric_rows, "copy_rows", half)
    carry_rows(source, "", make_job(2, name="lin"), new, 4)
    assert "trainer-0-a.every1.000000.rows does NOT go along: " in capfd.readouterr().err
    assert [path.name for path in new.rglob("*") if path.is_file()] == ["csv-logger.json"]


@pytest.mark.parametrize("name", ["launcher.lock", "continued.json"])
def test_a_run_in_a_folder_that_is_read_only_is_not_carried_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The help was to look at the folder that was to be made."""
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "jobs" / "lin", job := make_job(2, name="lin"), states(job))
    bad, real, write = Path("jobs", "lin", name), os.open, Path.write_bytes

    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if Path(path) == bad and flags & os.O_RDWR:
            raise OSError(30, "Read-only file system", str(path))
        return real(path, flags, *rest, **more)

    def written(path: Path, data: bytes) -> int:
        if path == bad:
            raise OSError(30, "Read-only file system", str(path))
        return write(path, data)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(Path, "write_bytes", written)
    with pytest.raises(
        GraphftError, match=f"jobs/lin is to be gone on with, and jobs/lin/{name} cannot be written"
    ) as e:
        open_folder(make_job(3, name="lin"))
    assert "make jobs/lin writable" in e.value.help
    assert [path.name for path in Path("jobs").iterdir()] == ["lin"]


def test_who_launches_what_was_left_is_told_where_it_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_saved, "launch_directory", lambda *_: None)
    begin(tmp_path / "jobs" / "lin", job := make_job(2, name="lin"), states(job))
    assert main(["launch", "--job", "lin"]) == 0
    assert "went on in" not in capfd.readouterr().err
    open_folder(make_job(3, name="lin"))
    assert main(["launch", "--job", "lin"]) == 0
    assert "jobs/lin went on in jobs/lin-2: what is trained here is another course" in capfd.readouterr().err


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/storage/lin"
        return
    if missing := [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    with s3_server("bucket") as options:
        monkeypatch.setitem(fsspec.config.conf, "s3", options)
        yield "s3://bucket/runs/lin"


def test_another_machine_knows_by_the_storage_what_a_run_went_on_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """The mark lay in the folder of the machine that went on: another one resumed the old run beside the new one."""

    def on(machine: str, pservers: int) -> str:
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / machine)
        job = make_job(pservers, name="lin", storage=storage)
        return open_folder(job).describe(job.config)

    assert on("one", 2) == f"new run in jobs/lin, storage {storage}"
    begin_in(Path("jobs/lin"), states(Job.load(Path("jobs/lin"))))
    assert "from step 5 of 8 of jobs/lin, carried over to 3 pservers, in jobs/lin-2" in on("one", 3)
    assert "resuming jobs/lin-2 at step 5 of 8" in on("two", 3)
    line = on("three", 2)
    assert f"jobs/lin went on in {storage}-2" in line, line
    assert "from step 5 of 8 of jobs/lin-2, carried over to 2 pservers, in jobs/lin-3" in line, line
    model = tmp_path / "model"
    model.write_bytes((2).to_bytes(8, "little") + b"{}")
    fs, root = file_system(f"{storage}-3")
    fs.upload(model, f"{root}/model.safetensors")
    line = on("four", 3)
    assert f"jobs/lin-2 went on in {storage}-3, which is complete" in line, line
    assert "; new run in jobs/lin-4" in line, "and not the old ones once more"
    for number in (2, 3):
        fs.delete(f"{root.removesuffix('-3')}-{number}")
    assert "resuming jobs/lin at step 5 of 8" in on("five", 2), "what it went on in is gone"


def test_the_one_that_is_farthest_is_carried_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, pservers, step in (("lin", 2, 3), ("lin-2", 3, 6), ("lin-3", 1, 4)):
        job = make_job(pservers, name="lin")
        begin(tmp_path / "jobs" / name, job, states(job), step)
    job = make_job(4, name="lin")
    assert "from step 6 of 8 of jobs/lin-2" in open_folder(job).describe(job.config)


def test_fresh_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "jobs" / "lin", job := make_job(2, name="lin"), states(job))
    fresh = make_job(3, name="lin")
    assert open_folder(fresh, fresh=True).describe(fresh.config).endswith("; new run in jobs/lin-2")
    shutil.rmtree("jobs/lin-2")
    assert "carried over to 3 pservers" in open_folder(fresh, resume=True).describe(fresh.config)


@pytest.mark.parametrize(
    "options", [{"seed": 4}, {"sync": False}, {"passes": 1}, {"batch_size": 4}], ids=lambda o: next(iter(o))
)
def test_what_differs_in_more_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "jobs" / "lin", job := make_job(2, name="lin"), states(job))
    other = make_job(3, **{"name": "lin", **options})
    assert not layout_differences(other, Path("jobs/lin"))
    assert open_folder(other).describe(other.config).endswith("; new run in jobs/lin-2")
    with pytest.raises(UsageError, match="there is no unfinished run of this job to resume"):
        open_folder(make_job(1, **{"name": "lin", **options}), resume=True)


def test_without_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "jobs" / "lin", job := make_job(2, name="lin"), states(job))
    (part,) = Path("jobs/lin/checkpoints").glob("*/shard-0-*")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    other = make_job(3, name="lin")
    with pytest.raises(GraphftError, match="is not what was written"):
        open_folder(other)
    assert not Path("jobs/lin-2").exists(), "nothing is begun from nothing without a word"
    assert not Path("jobs/lin", CONTINUED).exists()
    assert open_folder(other, fresh=True).describe(other.config).endswith("; new run in jobs/lin-2")


def test_no_checkpoint_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_job(2, name="lin").save("jobs/lin")
    Path("jobs/lin/logs").mkdir()
    other = make_job(3, name="lin")
    assert open_folder(other).describe(other.config).endswith("; new run in jobs/lin-2")


def test_what_a_shard_holds_is_checked(tmp_path: Path) -> None:
    old, new = make_job(2), make_job(3)
    values = states(old)
    del values[1]["global_step"]
    with pytest.raises(GraphftError, match="shard 1 does not hold the same as shard 0"):
        reshard(old, values, new)
    old.save(tmp_path / "old")
    assert carry_over(tmp_path / "old", new, tmp_path / "new") is None
    assert not (tmp_path / "new").exists()


def test_a_state_that_was_put_in_place_stays_so(tmp_path: Path) -> None:
    old, new = make_job(2), make_job(3)
    old.save(tmp_path / "old")
    begin_in(tmp_path / "old", states(old))
    store = checkpoints_of(tmp_path / "old")
    store.set_floor(store.manifests()[0])
    assert carry_over(tmp_path / "old", new, tmp_path / "new") == STEP
    (carried,) = checkpoints_of(tmp_path / "new").manifests()
    assert is_loaded(carried.meta), "who begins there sets the floor"


def test_a_carried_checkpoint_trains_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"name": "lin", "checkpoint_every": 1, "keep_checkpoints": 99}
    whole = graphft.read_weights(make_job(1, **options).run(quiet=True).model)
    _cut_off(Path("jobs/lin"), 3)
    result = make_job(3, **options).run(quiet=True)
    assert Path(result.model).parent.name == "lin-2"
    end = graphft.read_weights(result.model)
    assert all(torch.equal(end[n], whole[n]) for n in whole)


class Steps:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[float] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def on_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        assert metrics["left_out"] == 0
        self.epochs.append(epoch)


def logged(result: Result) -> str:
    return "step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in result.metrics["loss"])


def test_more_passes_give_the_bits_of_a_job_that_had_them_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a complete run, then of one that was interrupted, and on other pservers; fewer passes are another run."""
    monkeypatch.chdir(tmp_path)
    options, told = {"name": "lin", "checkpoint_every": 1, "keep_checkpoints": 99}, Steps()

    def run(job: Job) -> Result:
        return job.run(quiet=True, callbacks=[told, CSVLogger("log.csv"), CSVLogger()])

    undisturbed = make_job(2, passes=5, name="whole").run(quiet=True)
    whole = graphft.read_weights(undisturbed.model)
    run(make_job(2, **options))
    assert run(make_job(2, passes=3, **options)).steps == 12
    line = "jobs/lin differs in: passes 2 -> 3; going on from step 8 of 12 of jobs/lin, carried over to 3 passes, in "
    assert f"{line}jobs/lin-2\n" in capfd.readouterr().err
    assert look_at(Path("jobs/lin")).state == "complete"
    _cut_off(Path("jobs/lin-2"), 11)
    result = run(make_job(3, passes=5, **options))
    assert Path(result.model).parent.name == "lin-3"
    assert result.metrics == undisturbed.metrics, "those of the steps before are its own, too"
    assert (told.steps, told.epochs) == ([*range(20)], [1, 2, 3, 4, 5])
    assert {Path("log.csv").read_text(), Path("jobs/lin-3/steps.csv").read_text()} == {logged(undisturbed)}
    line = r"from step \d+ of 20 of jobs/lin-2, carried over to 3 pservers and 5 passes, in jobs/lin-3\n"
    assert re.search(line, capfd.readouterr().err)
    end = graphft.read_weights(result.model)
    assert all(torch.equal(end[n], whole[n]) for n in whole)
    few = make_job(2, passes=1, **options)
    assert open_folder(few).describe(few.config).endswith("; new run in jobs/lin-4")


def test_a_complete_run_whose_checkpoints_were_cleaned_says_that_it_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began from scratch, and did not say why. A run whose checkpoints were lost is another matter."""
    monkeypatch.chdir(tmp_path)
    old, more = make_job(2, name="lin"), make_job(2, passes=3, name="lin")
    begin(Path("jobs/lin"), old, states(old))
    Path("jobs/lin/model.safetensors").touch()
    assert main(["clean", "--job", "jobs/lin", "--checkpoints"]) == 0
    why = "and has no checkpoint to go on from (its model.safetensors can be the start: init_from=)"
    with pytest.raises(GraphftError, match=r"no unfinished run .* to resume: jobs/lin differs in: passes 2"):
        open_folder(more, resume=True)
    line = open_folder(more).describe(more.config)
    assert line == f"jobs/lin differs in: passes 2 -> 3, {why}; new run in jobs/lin-2"
    shutil.rmtree("jobs/lin-2")
    note_saved(Path("jobs/lin"), STEP)
    with pytest.raises(GraphftError, match="are gone, or damaged"):
        open_folder(more)


def _cut_off(folder: Path, step: int) -> None:
    """As if it had been interrupted there; where that step's checkpoint was passed over, behind the first."""
    (folder / "model.safetensors").unlink()
    steps = {path: int(path.name.split("-")[1].split(".")[0]) for path in (folder / "checkpoints").iterdir()}
    for path, of in steps.items():
        if of > max(step, min(steps.values())):
            shutil.rmtree(path)
    shutil.rmtree(folder / "etcd", ignore_errors=True)
