"""Examples run as their reader would run them, small, and learn something. CI runs the first, `make examples` all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = {
    "01_linear_regression": ("", r"R2 +([\d.]+)", 0.45),
    "02_digits": ("", r"held-out accuracy +([\d.]+)", 0.9),
    "03_flights": ("--passes 5 --kill-at 0.02", r"held-out AUC +([\d.]+)", 0.6),
    "04_tiny_gpt": ("", r"unseen text +([0-4]\.\d+)", 0),
    "05_own_loop": ("--checkpoints run", r"accuracy +([\d.]+)", 0.5),
    "06_tasks": ("", r"scores of 1,(\d+) records", 797),
    "07_trainer": ("--kill-at 3", r"held-out accuracy +([\d.]+)", 0.93),
}
"""Options, and what the output has to say: a number of at least so much."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(CASES) if "GRAPHFT_EXAMPLES" in os.environ else list(CASES)[:1])
def test_example(name: str, tmp_path: Path) -> None:
    options, pattern, least = CASES[name]
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--small", *options.split()]
    shown = subprocess.run(command, cwd=tmp_path, timeout=280, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    found = re.search(pattern, shown.stdout)
    assert found, shown.stdout
    assert float(found[1]) >= least


def test_all_examples_have_a_case() -> None:
    assert {p.stem for p in EXAMPLES.glob("[0-9]*.py")} == CASES.keys()
