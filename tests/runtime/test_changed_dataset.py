"""A Dataset whose records were changed since a run of it began: some are compared, and the launcher says how many."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import graphft
from graphft import data_inspection
from graphft.data import DataSpec
from graphft.errors import UsageError
from graphft.runtime.launcher.job_folder import open_folder
from graphft.runtime.roles.environment import _check_same
from graphft.transpiler import Job, read_record
from tests.data.datasets import Lines
from tests.support.programs_by_hand import linear

RECORDS = 5000
COMPARED = 15
"""13 evenly spaced ones, with the middle one among them, and two others."""
FIRST = Path("jobs/lines")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    made = job(**options)
    return open_folder(made).describe(made.config)


def compared(spec: DataSpec) -> list[int]:
    return sorted(int(name.split()[1]) for name in spec.fingerprint() if name.startswith("record "))


def begin() -> None:
    assert said() == "new run in jobs/lines"
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
    """Pitfall 65: labels in the data's file were corrected, and the old run went on."""
    write()
    begin()
    same = "resuming jobs/lines at step 0 of 1250 (job unchanged, as far as 15 of its Dataset's records tell)"
    assert said() == same
    first, *_, other = compared(described())[1:-1]
    write(**{f"line_{other}": "-1"})
    left = "(with the data as they were, graphft launch --job jobs/lines goes on with it)"
    assert said() == f"jobs/lines differs in: record {other} of the dataset {left}; new run in jobs/lines-2"
    write(**{f"line_{first}": "-1", f"line_{other}": "-1"})
    assert f"jobs/lines differs in: records {first}, {other} of the dataset" in said()
    write(**{f"line_{first + 1}": "-1"})
    assert said() == same, "it was not read: the line does not claim more"


def test_a_record_that_was_mended_is_told() -> None:
    number = 2083
    write(**{f"line_{number}": "no number"})
    begin()
    assert number in compared(described())
    assert f"(job unchanged, as far as {COMPARED}" in said()
    write()
    assert f"differs in: record {number} of the dataset" in said()


def test_a_short_dataset_is_compared_whole() -> None:
    Path("lines.txt").write_text("\n".join("12345678"))
    begin()
    assert said().endswith("(job unchanged)")


@pytest.mark.parametrize("options", [{"args": {"noise": True}}, {"random": True}])
def test_a_dataset_that_draws_is_compared_as_well(options: dict[str, Any]) -> None:
    """With the same seeds. Labels of images that are augmented were all changed, and the old run went on."""
    write()
    said(**options)
    (FIRST / "checkpoints").mkdir()
    assert said(**options).endswith(f"(job unchanged, as far as {COMPARED} of its Dataset's records tell)")
    write(line_0="-1")
    assert "differs in: record 0 of the dataset" in said(**options)


def test_a_record_that_differs_with_the_same_seeds_begins_no_new_run_of_a_dataset_that_draws() -> None:
    write()
    number = compared(described())[1]
    assert compared(described(args={"noise": True})).count(number) == 1
    assert compared(described(args={"noise": True, "entropy": [number]})).count(number) == 0


def test_a_run_of_a_graphft_that_compared_no_records_is_resumed() -> None:
    write()
    begin()
    record = json.loads((FIRST / "job.json").read_text())
    for prints in (record["config"]["data"]["source"]["fingerprint"], record["fingerprint"]["data"]):
        for name in [n for n in prints if n.startswith("record ")]:
            del prints[name]
    (FIRST / "job.json").write_text(json.dumps(record))
    assert said().endswith("(job unchanged, as far as is known: no records of its Dataset were compared)")
    _check_same(read_record(FIRST), job(), FIRST)


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
    assert f"(job unchanged, as far as {len(few)} of its Dataset's records tell)" in said()
