"""A Dataset whose records were changed since a run of it began: some are compared, and the launcher says how many."""

from __future__ import annotations

import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft import data_inspection
from graphft.data import DataSpec
from graphft.errors import UsageError
from graphft.runtime.launcher.run_folder import open_run
from graphft.runtime.roles.environment import _check_same
from graphft.transpiler import Job, read_record
from tests.data.datasets import Lines
from tests.support.programs_by_hand import linear

RECORDS = 5000
COMPARED = 15
"""13 evenly spaced ones, with the middle one among them, and two others."""
FIRST = Path("jobs/lines/runs/1")
SAME = f"resuming {FIRST} at step 0 of 1250"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_inspection, "DIGEST_SECONDS", 300.0)  # a loaded machine reads few records in two


def write(**changed: str) -> None:
    """The data file; `changed`: lines by number, as `line_7`."""
    lines = [str(i) for i in range(RECORDS)]
    for name, line in changed.items():
        lines[int(name.removeprefix("line_"))] = line
    Path("lines.txt").write_text("\n".join(lines))


def described(**options: Any) -> DataSpec:
    args = {"path": str(Path("lines.txt").absolute())}
    return graphft.dataset("tests.data.datasets:Lines", {**args, **options.pop("args", {})}, **options)


def job(**options: Any) -> Job:
    return graphft.transpile(linear(), chunks=described(**options), batch_size=4, ft=True, name="lines")


def said(**options: Any) -> str:
    return line(job(**options))


def line(made: Job) -> str:
    """As a launcher has it, which goes on with the job that it finds in the folder."""
    folder = open_run(made)
    text = folder.describe(Job.load(folder.path).config)
    if folder.path != FIRST:
        shutil.rmtree(folder.path)
    return text


def compared(spec: DataSpec) -> list[int]:
    return sorted(int(name.split()[1]) for name in spec.fingerprint() if name.startswith("record "))


def begin() -> None:
    assert said() == "new run in jobs/lines/runs/1"
    (FIRST / "checkpoints").mkdir()


def test_few_records_are_compared_and_at_most_five_of_them_read_twice() -> None:
    write()
    Lines.read.clear()
    numbers = compared(described())
    assert len(numbers) == COMPARED
    assert {0, RECORDS // 2, RECORDS - 1} <= set(numbers)
    assert max(b - a for a, b in pairwise(numbers)) <= RECORDS // 12 + 1, "evenly spaced"
    reads = Counter(Lines.read)
    assert set(reads) == set(numbers)
    assert reads.total() <= 16 + 5 + 1


def test_a_run_is_resumed_only_as_far_as_its_records_are_known_to_be_the_same() -> None:
    """Labels in the data's file were corrected, and the old run went on."""
    write()
    begin()
    assert said() == SAME
    first, *_, other = compared(described())[1:-1]
    write(**{f"line_{other}": "-1"})
    assert said() == f"{FIRST} differs in: record {other} of the dataset; new run in jobs/lines/runs/2"
    write(**{f"line_{first}": "-1", f"line_{other}": "-1"})
    assert f"{FIRST} differs in: records {first}, {other} of the dataset" in said()
    write(**{f"line_{first + 1}": "-1"})
    assert said() == SAME, "it was not read: the line does not claim more"


def test_a_record_that_was_mended_is_told() -> None:
    number = 2083
    write(**{f"line_{number}": "no number"})
    begin()
    assert number in compared(described())
    assert said() == SAME
    write()
    assert f"differs in: record {number} of the dataset" in said()


def test_a_short_dataset_is_compared_whole() -> None:
    Path("lines.txt").write_text("\n".join("12345678"))
    begin()
    assert said().startswith("resuming ")


@pytest.mark.parametrize("options", [{"args": {"noise": True}}, {"random": True}])
def test_a_dataset_that_draws_is_compared_as_well(options: dict[str, Any]) -> None:
    """With the same seeds. Labels of images that are augmented were all changed, and the old run went on."""
    write()
    said(**options)
    (FIRST / "checkpoints").mkdir()
    assert said(**options) == SAME
    write(line_0="-1")
    assert "differs in: record 0 of the dataset" in said(**options)


@pytest.mark.parametrize("options", [{"args": {"noise": True}}, {"random": True}])
def test_a_record_that_differs_with_the_same_seeds_begins_no_new_run_of_a_dataset_that_draws(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write()
    number = compared(described())[1]
    assert compared(described(**options)).count(number) == 1
    assert not caplog.records
    options = {**options, "args": {**options.get("args", {}), "entropy": [number]}}
    assert compared(described(**options)).count(number) == 0
    assert f"record {number} of the dataset of " in caplog.text, "and no word of it was said"


@pytest.mark.parametrize("noise", [False, True])
def test_a_record_that_cannot_be_read_for_a_moment_is_not_damaged(noise: bool) -> None:
    """Not all that reads from a storage raises an OSError when that is away: a new run was begun."""
    write()
    _, other, *_, five = compared(described(args={"noise": noise}))  # read for its digest only; twice
    found = described(args={"noise": noise, "throttled": [five, other]}).fingerprint()
    assert "unreadable" not in found.values()
    assert "unreadable" in described(args={"noise": noise, "throttled": [other] * 2}).fingerprint().values()


def validated() -> Job:
    """Trained on arrays, and validated with the Dataset."""
    model = torch.nn.Linear(200, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    inputs = {"x": (None, 200), "y": (None, 1)}
    made = graphft.build(model, lambda model, x, y: (model(x) - y).square().mean(), inputs=inputs)
    graphft.minimize(made, graphft.SGD(lr=0.1))
    trained = graphft.arrays(x=torch.zeros(8, 200), y=torch.zeros(8, 1), chunk_size=4)
    held_out = graphft.Validation(data=described())
    return graphft.transpile(made, data=trained, batch_size=4, validate=held_out, ft=True, name="lines")


def test_records_of_a_dataset_that_is_validated_with_are_compared_as_far_as_they_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many are read in time is another number each time: an unchanged job began a new run."""
    write()
    assert line(validated()) == "new run in jobs/lines/runs/1"
    (FIRST / "checkpoints").mkdir()
    monkeypatch.setattr(data_inspection, "DIGEST_SECONDS", -1.0)
    assert line(validated()).startswith("resuming ")
    _check_same(read_record(FIRST), validated(), FIRST)
    write(line_0="-1")
    assert "differs in: record 0 of the dataset that it is validated with" in line(validated())


def test_a_role_that_its_script_starts_refuses_changed_records() -> None:
    write()
    begin()
    write(**{f"line_{RECORDS - 1}": "-1"})
    with pytest.raises(UsageError, match=f"differs in: record {RECORDS - 1} of the dataset"):
        _check_same(read_record(FIRST), job(), FIRST)


def test_a_slow_dataset_is_not_described_more_slowly_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read by then is compared; the same data makes the same job."""
    write()
    begin()
    monkeypatch.setattr(data_inspection, "DIGEST_SECONDS", -1.0)
    few = compared(described())
    assert len(few) == 5
    assert said() == SAME
