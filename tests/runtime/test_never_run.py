"""Whose jobs are told of when a script ends that has not run them, and whose are not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.scripts import run

MADE = """
import os, graphft, torch
from tests.support.programs_by_hand import linear
os.chdir(os.path.dirname(__file__))
data = graphft.arrays(x=torch.zeros(8, 200), y=torch.zeros(8, 1), chunk_size=4)
job = graphft.transpile(linear(), data=data, batch_size=4, name="lines")
"""
AGAIN = """
other = graphft.transpile(linear(), data=data, batch_size=4, name="others")
other.save("jobs/others")
try:
    graphft.predict("jobs/others", {"x": torch.zeros(8, 200)})
except graphft.GraphftError as error:
    print(error)
"""
TRAINER = """
job.save("jobs/lines")
graphft.Trainer(graphft.transpile(linear(), data=data, batch_size=4, name="lines", ft=True))
"""
ENDED = """
from graphft.runtime.launcher.ending import interruptible
with interruptible(lambda: "interrupted"):
    raise KeyboardInterrupt
"""
ROLE = """
os.environ["GRAPHFT_ROLE"] = "nobody"
graphft.transpile(linear(), data=data, batch_size=4, name="others").run()
"""
NOT_RUN = "job lines (made at train.py:6) was NOT run by this process: job.run() trains it\n"


@pytest.mark.parametrize(
    ("then", "ends", "status"),
    [
        ("", NOT_RUN, 0),
        (AGAIN, NOT_RUN, 0),
        ("job.save('jobs/lines')", "", 0),
        ("job.epochs", "has no attribute 'epochs'\n", 1),
        (TRAINER, "", 0),
        (ENDED, "interrupted\n", 130),
        (ROLE, "", 2),
    ],
)
def test_a_script_that_never_runs_its_job_is_told_when_it_ends(
    then: str, ends: str, status: int, tmp_path: Path
) -> None:
    """Nothing was printed, and the exit status was 0. Another job that is run, or another run that is predicted with,
    makes no difference."""
    (tmp_path / "train.py").write_text(MADE + then)
    done = run(str(tmp_path / "train.py"), "")
    assert done.stderr.endswith(ends)
    assert (NOT_RUN in done.stderr) == (ends == NOT_RUN)
    assert done.returncode == status, done.stderr


def test_a_job_that_a_module_of_the_script_makes_is_told_as_well(tmp_path: Path) -> None:
    (tmp_path / "making.py").write_text("def make():" + MADE.replace("\n", "\n    "))
    (tmp_path / "train.py").write_text("import making\nmaking.make()\n")
    assert run(str(tmp_path / "train.py"), "").stderr.endswith(NOT_RUN.replace("train.py", "making.py"))
    at_prompt = run("import making; making.make()", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert (at_prompt.returncode, "NOT run" in at_prompt.stderr) == (0, False)


CHILD = """
if __name__ == "__main__":
    from multiprocessing import get_context
    job.save("jobs/lines")
    child = get_context("spawn").Process(target=print, args=("in the child",))
    child.start()
    child.join()
"""
DATASET = """
if __name__ == "__main__":
    job.save("jobs/lines")
    graphft.dataset(os.path.abspath("making.py") + ":make")
"""


IN_FUNCTION = "import graphft, os, torch\n" + "\n    ".join(
    ["def lines():", *MADE.splitlines(), "return job\njob, *_ = [lines() for _ in 'a']\n"]
)


@pytest.mark.parametrize("made", [MADE, IN_FUNCTION])
@pytest.mark.parametrize("then", [CHILD, DATASET, "import making\njob.save('jobs/lines')\n"])
def test_a_job_that_a_script_makes_for_its_import_alone_is_not_told(then: str, made: str, tmp_path: Path) -> None:
    """As trainers, and children of data loaders, import the script that README shows."""
    (tmp_path / "train.py").write_text(made + then)
    (tmp_path / "making.py").write_text(made + "def make():\n    return [(torch.zeros(2), torch.zeros(1))] * 8\n")
    done = run(str(tmp_path / "train.py"), "")
    assert (done.returncode, "NOT run" in done.stderr) == (0, False), done.stderr


CALLED = "os.environ['GRAPHFT_CALLED'] = '1'\n"
NOTHING = "train.py ended and never called job.run(): nothing was run\n"


@pytest.mark.parametrize(
    ("made", "then", "told"),
    [
        (MADE, CALLED, NOT_RUN),
        (MADE, CALLED + "raise SystemExit", NOT_RUN),
        (MADE, "raise SystemExit", NOTHING),
        ("", "raise SystemExit(0)", NOTHING),
    ],
)
def test_a_job_that_is_forgotten_beside_another_is_told_by_the_command_as_well(
    made: str, then: str, told: str, tmp_path: Path
) -> None:
    """It was told of a script that runs none, and does not end by itself."""
    (tmp_path / "train.py").write_text(made + then)
    done = run(
        f"import sys; from graphft.runtime.cli import main; sys.exit(main(['launch', {str(tmp_path / 'train.py')!r}]))"
    )
    assert (done.returncode, done.stderr.removeprefix(f"{tmp_path}/")) == (0, told)


@pytest.mark.parametrize(("then", "error"), [("1 / 0", "ZeroDivisionError"), ("", "error[nothing-run]")])
def test_of_a_script_of_graphft_launch_its_error_alone_is_told(then: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MADE + then)
    script = str(tmp_path / "train.py")
    done = run(f"import sys; from graphft.runtime.cli import main; sys.exit(main(['launch', {script!r}]))")
    assert error in done.stderr
    assert NOT_RUN not in done.stderr
