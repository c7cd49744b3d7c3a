"""`graphft.predict`: each record once, in order, with the bits of the model, whatever works on it and dies."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import graphft
from graphft.errors import GraphftError
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.launcher.launch import _told
from graphft.runtime.launcher.result import Result
from graphft.runtime.prediction.predict import Request, results_of
from graphft.runtime.process.validations import note_validation
from graphft.runtime.validation.best_model import BestModels, Kept
from graphft.transpiler import Job
from tests.prediction.jobs import FEATURES, RECORDS, X, by_batches, complete_job, make_model
from tests.support.processes import command_line


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Sequential]:
    folder = tmp_path_factory.mktemp("predict") / "job"
    return folder, complete_job(folder)


def request(folder: Path, data: Any, **options: Any) -> Request:
    given = {"columns": None, "batch_size": None, "step": None, "best": False, "device": None, **options}
    return Request.of(folder, data, **given)


def workers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "predict-worker" in command_line(p)]


def test_any_number_of_workers_gives_the_bits_of_the_model(job: tuple[Path, nn.Sequential]) -> None:
    folder, model = job
    data = graphft.arrays(x=X, y=torch.zeros(RECORDS), chunk_size=96)  # what is not needed is not looked at
    want = by_batches(model, X[:960])
    for count in (1, 3):
        found = graphft.predict(folder, data, workers=count)["output"]
        assert found.shape == (RECORDS, 3)
        assert torch.equal(found[:960], want)
    assert torch.equal(graphft.predict(folder, {"x": X})["output"], by_batches(model, X))


def test_workers_that_are_killed_lose_nothing(
    job: tuple[Path, nn.Sequential], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = job
    made, killed = request(folder, graphft.arrays(x=X, chunk_size=64)), []

    def kill(done: int, of: int) -> None:
        if done in (1, 5) and of == 16:
            for process in workers():
                process.send_signal(signal.SIGKILL)
                killed.append(process.pid)

    work = made.compute(tmp_path, 2, kill)
    assert len(killed) >= 2
    assert "another one computes them" in caplog.text
    found = torch.cat([part["output"] for part in results_of(work, made.program)])
    assert torch.equal(found, by_batches(model, X))
    assert not workers()


def test_a_part_that_ends_its_workers_is_named(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    module = tmp_path / "deadly.py"
    module.write_text(
        textwrap.dedent(
            f"""
            import os, signal, torch
            class Deadly(torch.utils.data.Dataset):
                def __init__(self, spared):
                    self.spared = spared
                def __len__(self):
                    return 96
                def __getitem__(self, i):
                    if i == 40 and os.getpid() != self.spared:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return torch.full(({FEATURES},), float(i)),
            """
        )
    )
    data = graphft.dataset(f"{module}:Deadly", {"spared": os.getpid()}, columns=("x",), chunk_size=32)
    with pytest.raises(
        GraphftError, match="3 workers in a row died with records 32 to 64, the last one: killed by SIG"
    ):
        graphft.predict(job[0], data, workers=2)
    assert not workers()


def test_a_dead_worker_whose_child_lives_on_is_replaced(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    module, left = tmp_path / "forking.py", tmp_path / "child"
    module.write_text(
        textwrap.dedent(
            f"""
            import os, signal, time, torch
            class Forking(torch.utils.data.Dataset):
                def __init__(self, child, spared):
                    self.child, self.spared = child, spared
                def __len__(self):
                    return 96
                def __getitem__(self, i):
                    if i == 40 and os.getpid() != self.spared and not os.path.exists(self.child):
                        if (pid := os.fork()) == 0:
                            time.sleep(600)
                            os._exit(0)
                        with open(self.child, "w") as file:
                            file.write(str(pid))
                        os.kill(os.getpid(), signal.SIGKILL)
                    return torch.full(({FEATURES},), float(i)),
            """
        )
    )
    args = {"child": str(left), "spared": os.getpid()}
    data = graphft.dataset(f"{module}:Forking", args, columns=("x",), chunk_size=32)
    try:
        found = graphft.predict(job[0], data, workers=1)["output"]
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)  # it has the pipe that its parent answered by
    assert torch.equal(found, by_batches(job[1], torch.arange(96.0)[:, None].repeat(1, FEATURES)))


def test_what_a_killed_command_had_computed_counts(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    folder, model = job
    data = graphft.arrays(x=X, chunk_size=256)
    made = request(folder, data)

    def die(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.compute(tmp_path, 1, die)
    (there,) = (tmp_path / "results").iterdir()
    inode = there.stat().st_ino
    again = request(folder, data).compute(tmp_path, 1)
    assert there.stat().st_ino == inode, "not computed again"
    found = torch.cat([part["output"] for part in again.results()])
    assert torch.equal(found, by_batches(model, X))
    for damaged in ("program/values.safetensors", "program/program.gft", "data/x.npy"):
        (tmp_path / damaged).write_bytes(b"what nobody has written")
    (tmp_path / "results" / "000002.safetensors").unlink()
    found = torch.cat([part["output"] for part in request(folder, data).compute(tmp_path, 1).results()])
    assert torch.equal(found, by_batches(model, X)), "what workers need is written anew"
    other = request(folder, data, batch_size=16)
    assert not replace(other.work, folder=tmp_path).begin(other.program)
    assert not (tmp_path / "results").exists(), "those of another request do not count"


def test_a_result_that_is_damaged_is_no_result(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    made = request(job[0], graphft.arrays(x=X, chunk_size=512))
    work = made.compute(tmp_path, 1)
    part = tmp_path / "results" / "000001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(GraphftError, match="is not what was written\nhelp: run it again"):
        list(results_of(work, made.program))
    assert work.missing() == [1]
    shutil.copy(part.with_name("000000.safetensors"), part)
    with pytest.raises(GraphftError, match="holds other records"):
        list(results_of(work, made.program))
    assert work.missing() == [1]


def test_what_is_not_finite_is_told(job: tuple[Path, nn.Sequential], caplog: pytest.LogCaptureFixture) -> None:
    x = X[:50].clone()
    x[7, 2] = float("nan")
    with caplog.at_level(logging.WARNING, "graphft"):
        found = graphft.predict(job[0], {"x": x})["output"]
    assert found[7].isnan().all()
    assert found[8].isfinite().all()
    assert "'output' is NOT FINITE for 1 of 50 records: record 7" in caplog.text
    assert "column x" in caplog.text, "and so are the inputs"


def test_a_batch_of_fixed_size_is_filled_up(tmp_path: Path) -> None:
    model = complete_job(tmp_path / "job", dim=8, batch_size=8)
    found = graphft.predict(tmp_path / "job", {"x": X[:21]})["output"]
    filled = torch.cat([X[:21], X[20:21].expand(3, FEATURES)])
    assert torch.equal(found, by_batches(model, filled, 8)[:21])
    with pytest.raises(GraphftError, match="captured for batches of 8, batch_size is 5"):
        graphft.predict(tmp_path / "job", {"x": X[:21]}, batch_size=5)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"z": X}, {}, r"input x \(float32\[batch, 4\]\) is not in the data, which has z"),
        ({"x": X.double()}, {}, r"the data's column is float64\[batch, 4\]\nhelp: convert it: x.astype\('float32'\)"),
        ({"x": X[:, :3]}, {}, r"the data's column is float32\[batch, 3\]"),
        ({"x": X}, {"workers": 0}, "workers is 0, expected a number, 1 or more"),
        ({"x": X}, {"worker": 2}, r"predict has no option worker\nhelp: did you mean workers\?"),
        ({"x": X}, {"batch_size": "8"}, "batch_size is '8', expected a number, 1 or more"),
        ({"x": 3.0}, {}, "column x is a single value"),
        ({"x": X.to("meta")}, {}, "column x: "),
        ({"x": np.ma.masked_greater(X.numpy(), 0)}, {}, "column x is a masked array, and [0-9]+ of its elements are"),
        ({"x": X}, {"step": 7}, "has no checkpoint of step 7"),
        ({"x": X}, {"device": "cuda:99"}, r"cuda:99, which .*\nhelp: name another one: --device cpu"),
        ({"x": X}, {"columns": {"x": "a"}}, "columns are given, and no files"),
        (X, {}, "the data is a Tensor\nhelp: give a .csv"),
        ("new.xls", {}, "new.xls ends in '.xls'\nhelp: give a .csv"),
        ("new.csv", {}, r"which fields of the file does it have\?"),
        ("gone.npz", {}, "gone.npz cannot be read"),
        ("gone.csv", {"columns": {"x": "abcd"}}, "cannot open .*gone.csv"),
        ("new.csv", {"columns": {"y": "b"}}, "there is no input y: what is predicted is computed of x"),
    ],
)
def test_what_does_not_fit(job: tuple[Path, nn.Sequential], data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphftError, match=message) as caught:
        graphft.predict(job[0], data, **options)
    assert caught.value.help
    assert not workers()


def test_a_file_of_arrays_that_is_damaged(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=X.numpy(), note=np.array(["text", None]))
    data = (tmp_path / "x.npz").read_bytes()
    found = graphft.predict(job[0], tmp_path / "x.npz", workers=1)
    assert torch.equal(found["output"], by_batches(job[1], X)), "other arrays are not read"
    flipped = bytes([*data[:200], data[200] ^ 64, *data[201:]])
    for name, content in (("cut", data[:-30]), ("flipped", flipped), ("empty", b""), ("text", b"1,2,3\n")):
        (tmp_path / f"{name}.npz").write_bytes(content)
        with pytest.raises(GraphftError, match=rf"{name}\.npz cannot be read"):
            graphft.predict(job[0], tmp_path / f"{name}.npz")
    np.save(tmp_path / "one.npy", X.numpy())
    os.rename(tmp_path / "one.npy", tmp_path / "one.npz")
    with pytest.raises(GraphftError, match=r"one\.npz cannot be read"):
        graphft.predict(job[0], tmp_path / "one.npz")


def test_who_has_no_weights_yet(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    complete_job(tmp_path / "job")
    (tmp_path / "job" / "model.safetensors").unlink()
    with pytest.raises(GraphftError, match="has no checkpoint"):
        graphft.predict(tmp_path / "job", {"x": X})
    with pytest.raises(GraphftError, match="there is no job nothing-there"):
        graphft.predict("nothing-there", {"x": X})


def test_the_best_model(
    job: tuple[Path, nn.Sequential], tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    held_out = graphft.arrays(x=X[:64], y=torch.zeros(64).long(), chunk_size=32)
    folder = tmp_path / "job"
    complete_job(folder, validate=graphft.Validation(data=held_out, best="loss"), ft=True)
    with pytest.raises(GraphftError, match="has no best model"):
        graphft.predict(folder, {"x": X}, best=True)
    best = make_model(2)
    models = BestModels(folder, "min")
    models.write(Kept(2, 0.5), best.state_dict())
    models.write(Kept(4, 0.7), make_model(3).state_dict())
    found = graphft.predict(folder, {"x": X[:64]}, best=True)["output"]
    assert torch.equal(found, by_batches(best.eval(), X[:64]))
    _told(Result.of(folder, 4, 1.0), Job.load(folder))
    assert "MISSING from" not in capfd.readouterr().err
    (folder / "best" / "step-00000002.safetensors").unlink()
    _told(Result.of(folder, 4, 1.0), Job.load(folder))
    assert "the model of step 2, the best one by loss, is MISSING from " in capfd.readouterr().err, (
        "when a run ends, too"
    )
    with pytest.raises(GraphftError, match="the model of step 2, the best one by loss, is MISSING from "):
        graphft.predict(folder, {"x": X}, best=True)
    note_validation(folder, 1, 4, {"loss": 0.7})
    note_validation(folder, 1, 3, {"loss": math.inf})
    (folder / "best" / "step-00000002.json").unlink()
    graphft.predict(folder, {"x": X}, best=True)
    assert "MISSING" not in caplog.text, "it is the best that there was"
    note_validation(folder, 1, 2, {"loss": 0.5})
    graphft.predict(folder, {"x": X}, best=True)
    line = "the model of step 2, the best one by loss, is MISSING from "
    assert line in caplog.text
    assert caplog.text.rstrip().endswith("; of those there, that of step 4 is the best")
    assert line in look_at(folder).describe()
    (folder / "best" / "step-00000004.safetensors").write_bytes(b"")
    (folder / "validation.jsonl").unlink()
    assert "the model of step 4, the best one by loss, is MISSING" in look_at(folder).describe(), "it is empty"
    note_validation(folder, 1, 2, {"loss": 0.5})
    shutil.rmtree(folder / "best")
    with pytest.raises(GraphftError, match=line):
        graphft.predict(folder, {"x": X}, best=True)
    with pytest.raises(GraphftError, match="the best model is asked for, and step 2, too"):
        graphft.predict(folder, {"x": X}, best=True, step=2)


def test_other_weights(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    other = make_model(3).eval()
    graphft.save_check_point({"model": other}, graphft.TrainStatus(0), tmp_path / "best")
    found = graphft.predict(job[0], {"x": X}, weights=tmp_path / "best")["output"]
    assert torch.equal(found, by_batches(other, X))
    with pytest.raises(GraphftError, match="weights are given, and step or best, too"):
        graphft.predict(job[0], {"x": X}, weights=tmp_path / "best", best=True)


def test_arrays_of_numpy_and_files_are_the_same(job: tuple[Path, nn.Sequential], tmp_path: Path) -> None:
    folder, model = job
    want = by_batches(model, X)
    np.savez(tmp_path / "x.npz", x=X.numpy(), y=np.zeros(3))
    np.save(tmp_path / "x.npy", X.numpy())
    assert torch.equal(graphft.predict(folder, tmp_path / "x.npz")["output"], want)
    assert torch.equal(graphft.predict(folder, str(tmp_path / "x.npy"))["output"], want)
