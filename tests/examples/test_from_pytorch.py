"""docs/from-pytorch.md: the loop and what is made of it run as they stand there, and come to the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphft.runtime.callbacks.callbacks import Callbacks

PAGE = Path(__file__).parents[2] / "docs" / "from-pytorch.md"
LOOP, JOB, CALLBACK = (part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loop_and_the_job(tmp_path: Path) -> None:
    data = LOOP.split("torch.manual_seed(0)")[0]
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "train.py").write_text(data + JOB + "        print(trainer.validate())\n")
    epochs = [eval(line.split(" ", 2)[2]) for line in run(tmp_path, "loop.py")]
    *trained, last = [line for line in run(tmp_path, "train.py") if line.startswith("{")]
    assert len(epochs) == len(trained) == 8
    assert epochs[-1] > 0.95
    assert eval(last)["accuracy"] > 0.95


def run(folder: Path, script: str) -> list[str]:
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_callback(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, type] = {}
    exec(CALLBACK, namespace)
    printer = namespace["Printer"]()
    Callbacks([printer])
    for step in range(3):
        printer.on_step(step, {"loss": 0.25})
    printer.on_epoch(1, {"loss": 0.5, "accuracy": 0.9, "seconds": 3.0})
    printer.on_validation(1, {"loss": 0.6})
    told = ["step 0: loss 0.2500", "epoch 1: loss 0.5000, accuracy 0.900", "epoch 1: held-out loss 0.6000"]
    assert capsys.readouterr().out.splitlines() == told
