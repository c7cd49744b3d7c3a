"""A Dataset that was changed since a run of it began: its source, its arguments and some of its items are compared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import graphft
from graphft.data import DataSpec
from graphft.errors import UsageError
from graphft.runtime.roles.environment import check_same
from graphft.transpiler.differences import data_differences
from graphft.transpiler.job import Job
from graphft.transpiler.record import read_record
from tests.data.datasets import Lines
from tests.support.programs_by_hand import linear

RECORDS = 5000
COMPARED = [0, 1250, 2500, 3749, 4999]
FOLDER = Path("job")


@pytest.fixture(autouse=True)
def written(own_folder: None) -> None:
    write()


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
    return graphft.transpile(linear(), data=described(**options), batch_size=4, ft=True, name="lines")


def test_few_records_are_compared() -> None:
    Lines.read.clear()
    described()
    assert Counter(Lines.read) == dict.fromkeys(COMPARED, 2)


@pytest.mark.parametrize("options", [{}, {"args": {"noise": True}}, {"random": True}])
def test_a_run_is_resumed_only_as_far_as_its_records_are_known_to_be_the_same(options: dict[str, Any]) -> None:
    job(**options).save(FOLDER)
    assert data_differences(read_record(FOLDER), job(**options)) == []
    write(line_1250="-1")
    assert data_differences(read_record(FOLDER), job(**options)) == ["the dataset's record 1250"]
    with pytest.raises(UsageError, match="differs in: the dataset's record 1250"):
        check_same(read_record(FOLDER), job(**options), FOLDER)
    write(line_1250="no number")
    assert data_differences(read_record(FOLDER), job(**options)) == ["the dataset's record 1250"]
    write(line_1251="-1")
    assert data_differences(read_record(FOLDER), job(**options)) == [], "it was not read"


def test_a_record_that_differs_with_the_same_seeds_is_refused() -> None:
    with pytest.raises(graphft.GraphftError) as caught:
        described(args={"entropy": [1250]})
    assert caught.value.rule == "dataset-changes"


def test_records_of_a_dataset_that_is_validated_with_are_compared() -> None:
    def validated() -> Job:
        model = torch.nn.Linear(200, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        inputs = {"x": (None, 200), "y": (None, 1)}
        made = graphft.build(model, lambda model, x, y: (model(x) - y).square().mean(), inputs=inputs)
        graphft.minimize(made, graphft.SGD(lr=0.1))
        trained = graphft.arrays(x=torch.zeros(8, 200), y=torch.zeros(8, 1), chunk_size=4)
        held_out = graphft.Validation(data=described())
        return graphft.transpile(made, data=trained, batch_size=4, validate=held_out, ft=True, name="lines")

    validated().save(FOLDER)
    assert data_differences(read_record(FOLDER), validated()) == []
    write(line_0="-1")
    assert data_differences(read_record(FOLDER), validated()) == ["data column validation: record 0"]
