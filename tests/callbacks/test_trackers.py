"""MLflow and Weights & Biases, as their own stores tell: each step once, over several scripts. They are large, and no
part of `make setup`: pip install "graphft[mlflow,wandb]"."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphft.callbacks import MLflow, TensorBoard, WandB
from graphft.errors import GraphftError
from tests.callbacks.test_csv_logger import run

ROOT = Path(__file__).resolve().parents[2]
WANDB_SCRIPT = """
import os, sys
from pathlib import Path
from graphft.callbacks import WandB
from tests.callbacks.test_csv_logger import run

place, first, last, killed = Path(sys.argv[1]), *map(int, sys.argv[2:])
board = WandB("cancer", mode="offline", dir=str(place), tags=["test"])
board.on_begin(run(place / "job"))
assert first <= board.held()[0], "what was lost is told again"
for step in range(first, last):
    board.on_step(step, {"loss": 0.5**step})
if killed:
    os.kill(os.getpid(), 9)
board.on_epoch(1, {"epoch": 1, "loss": 0.25})
board.on_validation(1, {"loss": 0.75})
board.on_end()
"""


@pytest.mark.parametrize(
    ("name", "package"), [("TensorBoard", "tensorboard"), ("MLflow", "mlflow"), ("WandB", "wandb")]
)
def test_a_missing_library_is_told_when_the_callback_is_made(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: None)
    make = {"TensorBoard": TensorBoard, "MLflow": MLflow, "WandB": WandB}[name]
    with pytest.raises(GraphftError, match=f"callback {name} needs the package {package}") as caught:
        make("x")
    assert f'pip install "graphft[{package}]"' in str(caught.value)


def test_mlflow_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (extra mlflow)")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for steps in (range(4), range(2, 7)):
        board = MLflow("cancer", tracking_uri=uri)
        board.on_begin(run(tmp_path / "job"))
        assert board.held()[0] == (0 if steps.start == 0 else 4)
        for step in steps:
            board.on_step(step, {"loss": 0.5**step, "acc@1": step})
        board.flush()
    board.on_epoch(1, {"epoch": 1, "loss": 0.25})
    board.on_validation(1, {"loss": 0.75})
    board.on_end()
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("cancer").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "job"
    assert found.data.params == {"batch_size": "4"}

    def values(key: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, key)]

    assert values("train/loss") == [(step, 0.5**step) for step in range(7)]
    assert values("train/acc_1") == [(step, step) for step in range(7)]
    assert values("epoch/loss") == [(1, 0.25)]
    assert values("validation/loss") == [(1, 0.75)]


def test_wandb_offline_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra wandb)")
    from graphft.runtime.callbacks.wandb_files import rows_of_offline_runs

    env = os.environ | {"PYTHONPATH": str(ROOT), "WANDB_SILENT": "true"}
    for first, last, killed in ((0, 4, 0), (4, 6, 1), (4, 8, 0)):
        told = subprocess.run(
            [sys.executable, "-c", WANDB_SCRIPT, str(tmp_path), str(first), str(last), str(killed)],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert told.returncode == (-9 if killed else 0), told.stderr
    rows = list(rows_of_offline_runs(tmp_path / "wandb", "0123456789abcdef"))
    assert [(r["train/step"], r["train/loss"]) for r in rows if "train/step" in r] == [(s, 0.5**s) for s in range(8)]
    assert [(r["epoch/epoch"], r["epoch/loss"]) for r in rows if "epoch/epoch" in r] == [(1, 0.25)]
    assert [(r["validation/epoch"], r["validation/loss"]) for r in rows if "validation/epoch" in r] == [(1, 0.75)]


def test_what_follows_from_the_run_is_not_given() -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra wandb)")
    with pytest.raises(GraphftError, match="was given id, which follows from the run"):
        WandB("cancer", id="mine")
