"""README.md: its script runs as it stands there, and finds its run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "README.md"
SCRIPT = PAGE.read_text().split("```python\n")[1].split("```")[0]


def run(folder: Path) -> tuple[str, str]:
    """Returns the first line, which says what is run, and the last, which says how good it has become."""
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr.splitlines()[0], done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_its_script(tmp_path: Path) -> None:
    said, good = run(tmp_path)
    assert said == "new run in jobs/cancer/runs/1"
    assert float(good.removeprefix("accuracy ")) > 0.95
    said, again = run(tmp_path)
    assert said.startswith("jobs/cancer/runs/1 is complete, and its result is returned"), said
    assert again == good
