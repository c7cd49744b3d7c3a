"""Descriptions of data: chunks, JSON, and errors that are raised when the data is described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphft.data import DataSpec, arrays, dataset, files
from graphft.errors import GraphftError, UsageError
from graphft.ir import Type
from tests.data.datasets import Lines

HERE = Path(__file__).parent
DATASETS = str(HERE / "datasets.py")


def through_json(spec: DataSpec) -> DataSpec:
    return DataSpec.from_json(json.loads(json.dumps(spec.to_json())))


def test_arrays() -> None:
    spec = arrays(x=torch.zeros(10, 3), y=np.zeros(10, np.int64), chunk_size=4)
    assert spec.columns == ("x", "y")
    assert spec.types == {"x": Type("float32", ("batch", 3)), "y": Type("int64", ("batch",))}
    assert [(c.id, c.records, c.start) for c in spec.chunks] == [(0, 4, 0), (1, 4, 4), (2, 2, 8)]
    assert spec.records == 10
    assert through_json(spec) == spec


def test_arrays_accept_lists_views_and_foreign_byte_order() -> None:
    swapped = np.arange(6, dtype=">i4")
    spec = arrays(a=[1.5, 2.5, 3.5], b=torch.arange(6).view(3, 2).t().t(), c=swapped[::2], d=[True, False, True])
    assert [t.dtype for t in spec.types.values()] == ["float64", "int64", "int32", "bool"]
    assert spec.values["c"].tolist() == [0, 2, 4]


def test_an_array_that_is_changed_in_place_is_not_the_described_one() -> None:
    x = torch.zeros(6)
    spec = arrays(x=x)
    assert spec.fingerprint().keys() == {"x"}
    x.add_(1)
    with pytest.raises(GraphftError, match=r"^error\[data-changed\]"):
        spec.fingerprint()


@pytest.mark.parametrize(
    ("size", "drop_last", "expected"),
    [(4, False, (1, 1, 1)), (3, False, (2, 2, 1)), (3, True, (1, 1, 0)), (2, True, (2, 2, 1))],
)
def test_batches(size: int, drop_last: bool, expected: tuple[int, ...]) -> None:
    assert arrays(x=torch.zeros(10), chunk_size=4).batches(size, drop_last) == expected


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: arrays(x=torch.zeros(3), y=torch.zeros(4)), "column-lengths"),
        (lambda: arrays(torch.zeros(3), torch.zeros(3)), "columns"),
        (lambda: arrays(x=torch.zeros(0)), "short-data"),
        *((lambda n=n: arrays(x=torch.zeros(3), chunk_size=n), "chunk-size") for n in (0, 2.5)),
        (lambda: arrays(x=torch.tensor(1.0)), "columns"),
        (lambda: arrays(x=torch.zeros(3, dtype=torch.bfloat16)), "columns"),
        (lambda: arrays(x=np.array(["a", "b"])), "columns"),
        (lambda: arrays(), "columns"),
        (lambda: arrays(**{"not a name": torch.zeros(3)}), "columns"),
        (lambda: arrays(x=torch.zeros(9), chunk_size=3).batches(4), "short-chunks"),
        (lambda: DataSpec.from_json({"kind": "arrays"}), "data"),
        (lambda: dataset("nowhere.py:make"), "dataset-reference"),
        (lambda: dataset("no_such_module:make"), "dataset-reference"),
        (lambda: dataset("json:no_such_function"), "dataset-reference"),
        (lambda: dataset("json"), "dataset-reference"),
        (lambda: dataset("json:__doc__"), "dataset-reference"),
        (lambda: dataset(lambda: [1, 2]), "dataset-reference"),
        (lambda: dataset(f"{DATASETS}:squares", {"n": object()}), "dataset-args"),
        (lambda: dataset(Lines, "/x.csv"), "dataset-args"),  # type: ignore[arg-type]
        (lambda: dataset(f"{DATASETS}:squares"), "dataset"),
        (lambda: dataset(f"{DATASETS}:squares", {"n": 0}), "short-data"),
        (lambda: dataset(f"{DATASETS}:squares", {"n": 3}, columns=("x", "y", "z")), "columns"),
        (lambda: dataset(f"{DATASETS}:Named", columns=("x", "q")), "columns"),
        (lambda: dataset(f"{DATASETS}:Named", columns=("x", "name")), "columns"),
        (lambda: dataset(f"{DATASETS}:fails"), "dataset"),
        (lambda: dataset(f"{DATASETS}:no_dataset"), "dataset"),
    ],
)
def test_errors(make: Any, rule: str) -> None:
    with pytest.raises(GraphftError, match=rf"^error\[{rule}\]"):
        make()


def test_dataset() -> None:
    spec = dataset(f"{DATASETS}:squares", {"n": 10}, chunk_size=4)
    assert spec.types == {"x": Type("float32", ("batch", 1)), "y": Type("int64", ("batch",))}
    assert [c.records for c in spec.chunks] == [4, 4, 2]
    assert spec.source["random"] is False
    assert through_json(spec) == spec


def module_level() -> list[tuple[float, int]]:
    return [(1.0, 1), (2.0, 2)]


def test_function_object_becomes_a_reference() -> None:
    spec = dataset(module_level)
    assert spec.source["name"] == "module_level"
    assert spec.source["module"].rpartition(".")[2] == "test_describe"
    relative = Path(*spec.source["module"].split(".")).with_suffix(".py")
    assert Path(spec.source["path"]) / relative == Path(__file__)


def test_fingerprints_of_arrays() -> None:
    """They tell values, dtype and shape apart, travel with the description, and take no part in a job's options."""
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    spec = arrays(x=x, y=np.zeros(6))
    for other in (x + 1, x.astype(np.float64), x.reshape(6, 1, 2)):
        changed = arrays(x=other, y=np.zeros(6)).fingerprint()
        assert changed["x"] != spec.fingerprint()["x"]
        assert changed["y"] == spec.fingerprint()["y"]
    assert arrays(x=torch.from_numpy(x), y=np.zeros(6)).fingerprint() == spec.fingerprint()
    assert through_json(spec).fingerprint() == spec.fingerprint()
    assert spec.options() == arrays(x=x + 1, y=np.zeros(6)).options()


def test_fingerprints_of_datasets(tmp_path: Path) -> None:
    source = tmp_path / "data.py"
    source.write_text("def make(n=3):\n    return [(1.0, 1)] * n\n")
    spec = dataset(f"{source}:make")
    longer = dataset(f"{source}:make", {"n": 4}).fingerprint()
    assert {k for k, v in longer.items() if v != spec.fingerprint().get(k)} == {"args", "records", "record 3"}
    source.write_text("def make(n=3):\n    return [(2.0, 1)] * n\n")
    changed = dataset(f"{source}:make").fingerprint()
    assert {k for k, v in changed.items() if v != spec.fingerprint()[k]} == {"code"}  # loaded once in a process
    assert dataset("tests.data.datasets:Squares").fingerprint() == dataset(f"{DATASETS}:Squares").fingerprint()
    assert through_json(spec).fingerprint() == spec.fingerprint()


class Short(Lines):
    """Says that it has more records than it has, from `end` on."""

    def __init__(self, end: int = 99, begin: int = 0) -> None:
        self.end, self.begin = end, begin

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if not self.begin <= i < self.end:
            raise IndexError(f"there is no record {i}")
        return torch.zeros(3), 1


def test_records_that_cannot_be_read_are_told_when_the_dataset_is_described(caplog: pytest.LogCaptureFixture) -> None:
    types = dataset(Short, {"end": 100}).types
    assert "cannot be read" not in caplog.text
    assert dataset(Short, {"end": 99}).types == dataset(Short, {"begin": 1, "end": 100}).types == types
    assert "cannot be read: [99] of 100" in caplog.text
    assert "cannot be read: [0] of 100" in caplog.text
    with pytest.raises(UsageError, match=r"3 of 5 records .* cannot be read: \[50, 74, 99\] of 100"):
        dataset(Short, {"end": 30})


def test_items_of_different_lengths_are_told_when_the_dataset_is_described() -> None:
    with pytest.raises(GraphftError, match=r"record [1-9]\d* of .*Ragged has column x as float32\[") as e:
        dataset(f"{DATASETS}:Ragged", columns=("x", "y"))
    assert "no collate_fn" in e.value.help


def test_objects_that_are_no_dataset_are_refused_with_what_to_give() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    for given, help in (
        (DataLoader(torch.zeros(4, 1)), "its Dataset's class"),  # type: ignore[arg-type]
        (TensorDataset(torch.zeros(4)), "graphft.arrays(x=..., y=...)"),
        (TensorDataset, "graphft.arrays(x=..., y=...)"),
        (Short(), "give the class, and its arguments by name: graphft.dataset(Short, "),
    ):
        with pytest.raises(GraphftError) as caught:
            dataset(given)  # type: ignore[arg-type]
        assert caught.value.rule == "dataset-reference"
        assert help in caught.value.help


def test_patterns_are_the_files_that_match(tmp_path: Path) -> None:
    for name, rows in (("b", 2), ("a", 3), ("c", 0)):
        (tmp_path / f"{name}.csv").write_text("x,y\n" + "1,2\n" * rows)
    (tmp_path / "folder.csv").mkdir()
    fields = {"x": "x", "y": "y"}
    spec = files(f"{tmp_path}/[ab].csv", "csv", columns=fields)
    assert [Path(url).name for url in spec.source["urls"]] == ["a.csv", "b.csv"]
    assert spec.records == 5
    assert files(f"file://{tmp_path}/?.csv", "csv", columns=fields).records == 5
    with pytest.raises(GraphftError, match=r"no file matches .*/no\*\.csv"):
        files(f"{tmp_path}/no*.csv", "csv", columns=fields)
    (tmp_path / "odd[1].csv").write_text("x,y\n1,2\n")
    assert files(f"{tmp_path}/odd[1].csv", "csv", columns=fields).records == 1, "a name that only looks like one"
