"""Columns of lists in Parquet files: what pyarrow and NumPy make of them, or an error that says which record is odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import graphft
from graphft.data import DataSpec
from graphft.errors import GraphftError
from graphft.runtime.data import IN_ORDER, BadRecords, open_reader

ROWS = [[float(i), i + 0.5] for i in range(10)]
NAN = float("nan")


def write(folder: Path, *tables: dict[str, Any], group: int = 4) -> list[str]:
    paths = [str(folder / f"{i}.parquet") for i in range(len(tables))]
    for path, table in zip(paths, tables, strict=True):
        pyarrow.parquet.write_table(pa.table(table), path, row_group_size=group)
    return paths


def described(paths: list[str], columns: Any, **dtypes: str) -> DataSpec:
    spec = graphft.files(paths, "parquet", columns, dtypes, chunk_size=3)
    return DataSpec.from_json(json.loads(json.dumps(spec.to_json())))


def read(spec: DataSpec) -> dict[str, torch.Tensor]:
    reader = open_reader(spec, ".", 0)
    batches = [reader.batch(IN_ORDER, chunk.id, 0, chunk.records) for chunk in spec.chunks]
    return {name: torch.cat([batch[name] for batch in batches]) for name in spec.columns}


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.float64()), pa.list_(pa.float32(), 2), pa.large_list(pa.float16()), pa.list_(pa.decimal128(5, 2))],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lists_of_one_length(tmp_path: Path, kind: pa.DataType, dtype: str) -> None:
    values = ROWS if not pa.types.is_decimal(kind.value_type) else np.array(ROWS).astype("U").astype(object).tolist()
    spec = described(write(tmp_path, {"e": pa.array(values).cast(kind), "c": range(10)}), {"e": "e", "c": "c"}, e=dtype)
    assert spec.types["e"] == graphft.ir.Type(dtype, ("batch", 2))
    found = read(spec)
    assert found["e"].dtype == getattr(torch, dtype)
    assert found["e"].tolist() == ROWS
    assert found["c"].tolist() == list(range(10))


def test_lists_lie_beside_other_fields(tmp_path: Path) -> None:
    spec = described(write(tmp_path, {"e": ROWS, "c": range(10), "e.x": range(10)}), {"x": ("c", "e"), "one": ("e",)})
    found = read(spec)
    assert found["x"].tolist() == [[i, *row] for i, row in enumerate(ROWS)]
    assert found["one"].tolist() == ROWS


WRITTEN = pytest.mark.skipif(
    int(pa.__version__.split(".")[0]) < 26, reason="pyarrow before 26 writes no null among lists of fixed size"
)


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pytest.param(pa.list_(pa.float32(), 2), marks=WRITTEN)])
def test_nulls_are_nan(tmp_path: Path, kind: pa.DataType) -> None:
    values = [[1.0, 2.0], None, [3.0, None], [4.0, 5.0]] * 3
    spec = described(write(tmp_path, {"e": pa.array(values, kind)}), {"e": "e"})
    wanted = torch.tensor([[1, 2], [NAN, NAN], [3, NAN], [4, 5]] * 3)
    assert torch.equal(read(spec)["e"].nan_to_num(-1), wanted.nan_to_num(-1))


@pytest.mark.parametrize(
    ("values", "null"), [(ROWS, pa.nulls(3)), ([1.0, 2.0], pa.nulls(3)), ([1.0, 2.0], pa.nulls(3, pa.float64()))]
)
def test_a_file_in_which_all_is_null(tmp_path: Path, values: list[Any], null: pa.Array) -> None:
    found = read(described(write(tmp_path, {"e": null}, {"e": values}), {"e": "e"}))["e"]
    assert found[:3].isnan().all()
    assert found[3:].tolist() == values


@pytest.mark.parametrize(
    ("tables", "rule", "words"),
    [
        ([{"e": [*ROWS[:2], [], *ROWS]}], "data", "field e has 0 values, expected 2"),
        ([{"e": [[], []]}], "data", "field e has no values in the first row group"),
        ([{"e": pa.nulls(3, pa.list_(pa.float64()))}], "data", "field e has no values in the first row group"),
        ([{"e": ROWS}, {"e": [[1.0]]}], "columns", "field e has 1 values in each record of .*1.parquet, and 2 before"),
        ([{"e": ROWS}, {"e": [1.0]}], "columns", "field e has 0 values in each record of .*1.parquet, and 2 before"),
        ([{"e": [[[1.0]]]}], "data", "field e is list<element: list<.*, no float32"),
        ([{"e": [["a"]]}], "data", "field e is list<element: string>, no float32"),
        ([{"e": [{"a": 1}]}], "data", "field e is struct"),
        ([{"e": [[1, None]] * 3}], "data", "field e is empty, no int64"),
    ],
)
def test_other_lists_are_refused(tmp_path: Path, tables: Any, rule: str, words: str) -> None:
    dtype = "int64" if "int64" in words else "float32"
    with pytest.raises(GraphftError, match=words) as caught:
        described(write(tmp_path, *tables), {"e": "e"}, e=dtype)
    assert caught.value.rule == rule


def test_a_list_that_only_reading_finds_too_long_is_a_bad_record(tmp_path: Path) -> None:
    """Another one of its row group is as much too short, so that the footer tells nothing."""
    spec = described(write(tmp_path, {"e": [*ROWS[:4], [1.0], *ROWS[5:7], [1.0, 2.0, 3.0]]}), {"e": "e"})
    with pytest.raises(BadRecords, match=r"record 4 of 0.parquet: field e has 1 values, expected 2") as caught:
        open_reader(spec, ".", 0).batch(IN_ORDER, 1, 0, 3)
    assert caught.value.positions == {1}
    assert read(described(write(tmp_path, {"e": ROWS}), {"e": "e"}))["e"].tolist() == ROWS


def test_a_value_in_a_list_that_is_none_of_the_dtype_is_a_bad_record(tmp_path: Path) -> None:
    spec = described(write(tmp_path, {"e": [[1.0, 2.0]] * 4 + [[1.0, 2.5]]}), {"e": "e"}, e="int64")
    with pytest.raises(BadRecords, match=r"record 4 of 0\.parquet: field e is .*2\.5.*, no int64") as caught:
        open_reader(spec, ".", 0).batch(IN_ORDER, 1, 0, 2)
    assert caught.value.positions == {1}
