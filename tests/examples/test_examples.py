"""Every example runs as its own reader would run it, small, and learns something."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path, *options: str) -> str:
    """The script's output. It runs in `folder`, so that what it writes lands there."""
    shown = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--small", *options],
        cwd=folder,
        timeout=280,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return shown.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found.group(1))


def parameters(text: str, folder: Path) -> int:
    """Number of tensors in the model file that the example names in its last lines."""
    file = re.search(r"model +(\S+\.safetensors)", text)
    assert file, text
    with safe_open(folder / file.group(1), "pt") as f:
        return len(list(f.keys()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_linear_regression(tmp_path: Path) -> None:
    text = run("01_linear_regression.py", tmp_path)
    assert "aten.addmm(%bias, %x, %weight)" in text
    assert number(r"R2 +([\d.]+)", text) > 0.45
    assert parameters(text, tmp_path) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_digits(tmp_path: Path) -> None:
    text = run("02_digits.py", tmp_path)
    assert number(r"held-out accuracy +([\d.]+)", text) > 0.9
    assert parameters(text, tmp_path) == 16


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.chaos
def test_flights(tmp_path: Path) -> None:
    text = run("03_flights.py", tmp_path, "--passes", "5", "--kill-at", "0.02")
    assert number(r"held-out AUC +([\d.]+)", text) > 0.6
    assert "killed" in text
    assert (tmp_path / "out" / "flights-loss.png").read_bytes().startswith(b"\x89PNG")
    assert parameters(text, tmp_path) == 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tiny_gpt(tmp_path: Path) -> None:
    text = run("04_tiny_gpt.py", tmp_path)
    assert number(r"unseen text +([\d.]+)", text) < 5.0
    assert "def read(self" in text
    assert parameters(text, tmp_path) == 41


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.chaos
def test_own_loop(tmp_path: Path) -> None:
    """Killed in the middle of an epoch, it ends with the bits of a run that was not."""
    undisturbed = run("05_own_loop.py", tmp_path, "--checkpoints", "memory://undisturbed")
    place = ("--checkpoints", str(tmp_path / "run"))
    command = [sys.executable, str(EXAMPLES / "05_own_loop.py"), "--small", *place, "--kill-at", "140"]
    killed = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    text = run("05_own_loop.py", tmp_path, *place)
    assert number(r"going on at epoch 2, step (\d+)", text) >= 114, "the one that was saved at the end of epoch 1"
    assert text.splitlines()[-2:] == undisturbed.splitlines()[-2:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.chaos
def test_tasks(tmp_path: Path) -> None:
    """A worker and the coordinator are killed; each record has its score, once."""
    text = run("06_tasks.py", tmp_path)
    assert "a worker and the coordinator are killed" in text
    assert text.count("this worker puts the scores together") == 1
    assert "scores of 1,797 records" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.chaos
def test_trainer(tmp_path: Path) -> None:
    """A worker is killed: the same epochs as without. The script, run again, has nothing left to train."""
    text = run("07_trainer.py", tmp_path, "--kill-at", "3")
    assert "worker 1 is killed" in text
    assert "1 preemptions" in text
    assert number(r"held-out accuracy +([\d.]+)", text) > 0.93
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    undisturbed = run("07_trainer.py", folder, "--kill-at", "0")
    killed = text.replace("1 preemptions", "0 preemptions").splitlines()
    assert [line for line in killed if "worker 1" not in line] == undisturbed.splitlines()
    assert run("07_trainer.py", tmp_path) == "".join(f"{line}\n" for line in killed[-3:])


def test_all_examples_are_tested() -> None:
    names = {p.name for p in EXAMPLES.glob("[0-9]*.py")}
    assert names == set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
