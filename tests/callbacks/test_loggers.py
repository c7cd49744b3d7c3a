"""The ready-made callbacks, as the readers of their files and stores see them: each step once, over several scripts."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from graphft.callbacks import CSVLogger, MLflow, Run, TensorBoard, WandB
from graphft.errors import GraphftError
from graphft.runtime.coordination.records import Event


def run(folder: Path) -> Run:
    folder.mkdir(exist_ok=True)
    return Run("job", "0123456789abcdef", folder, {"batch_size": 4})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def log(logger: Any, folder: Path, steps: range, **more: float) -> None:
    logger.on_begin(run(folder))
    for step in steps:
        logger.on_step(step, {"loss": 0.5**step, **more})
    logger.flush()


def test_csv_numbers_have_all_their_digits(tmp_path: Path) -> None:
    logger = CSVLogger()
    log(logger, tmp_path / "job", range(3), **{"acc, top": math.nan})
    logger.on_epoch(1, {"epoch": 1, "loss": 0.1 + 0.2, "samples": 96})
    logger.on_validation(1, {"loss": 0.5, "f1": 0.75})
    logger.on_validation(2, {"loss": 0.25, "f2": 1.0})
    logger.on_end()
    found = rows(tmp_path / "job" / "steps.csv")
    assert [(int(r["step"]), float(r["loss"]), r["acc, top"]) for r in found] == [(s, 0.5**s, "nan") for s in range(3)]
    assert (tmp_path / "job" / "steps-epochs.csv").read_text() == "epoch,loss,samples\n1,0.30000000000000004,96\n"
    validations = (tmp_path / "job" / "steps-validation.csv").read_text()
    assert validations == "epoch,loss,f1\n1,0.5,0.75\n2,0.25,\n", "the columns are those of the first row"


def test_csv_has_each_step_once_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "job" / "steps.csv"
    log(CSVLogger(), tmp_path / "job", range(4))
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        log(CSVLogger(), tmp_path / "job", range(4))
        assert path.read_bytes() == whole


def test_csv_leaves_files_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("date,what\n1,2\n")
    with pytest.raises(GraphftError, match=r"^error\[callbacks\]"):
        log(CSVLogger("notes.csv"), tmp_path, range(5))
    with pytest.raises(GraphftError):
        CSVLogger("elsewhere/steps.csv")


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra tensorboard)")
    for steps in (range(4), range(4, 8)):
        board = TensorBoard(tmp_path / "runs")
        log(board, tmp_path / "job", steps)
        board.on_epoch(steps.stop, {"epoch": steps.stop, "loss": 0.25})
        board.on_event(Event(1.0, "launcher", "died", "trainer 1 died"))
        board.on_end()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "job-01234567"
    found = scalars(folder)
    assert found["train/loss"] == [(step, 0.5**step) for step in range(8)]
    assert found["epoch/loss"] == [(4, 0.25), (8, 0.25)]


def test_a_missing_library_is_an_error_when_the_callback_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None)
    for make, package in ((TensorBoard, "tensorboard"), (MLflow, "mlflow"), (WandB, "wandb")):
        with pytest.raises(GraphftError) as caught:
            make("x")
        assert caught.value.help == f"pip install {package}"


def test_mlflow_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (extra mlflow)")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for steps in (range(4), range(2, 7)):
        board = MLflow("cancer", tracking_uri=uri)
        log(board, tmp_path / "job", steps, **{"acc@1": 0.5})
    board.on_epoch(1, {"epoch": 1, "loss": 0.25})
    board.on_end()
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("cancer").experiment_id])
    assert (found.info.status, found.info.run_name, found.data.params) == ("FINISHED", "job", {"batch_size": "4"})

    def values(key: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, key)]

    assert values("train/loss") == [(step, 0.5**step) for step in range(7)]
    assert values("train/acc_1") == [(step, 0.5) for step in range(7)]
    assert values("epoch/loss") == [(1, 0.25)]


def test_wandb_offline_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra wandb)")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in (range(2), range(2, 4)):
        board = WandB("cancer", mode="offline", dir=str(tmp_path))
        board.on_begin(run(tmp_path / "job"))
        for step in steps:
            board.on_step(step, {"loss": 0.5**step})
        board.on_end()
    assert list((tmp_path / "wandb").glob("offline-run-*-0123456789abcdef"))
    with pytest.raises(GraphftError):
        WandB("cancer", id="mine")
