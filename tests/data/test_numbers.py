"""What fields become as numbers: no value is changed by the others of its column, and none by an integer dtype."""

from __future__ import annotations

import gzip
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.data import DataSpec
from graphft.data_files import files
from graphft.data_numbers import fits, numbers
from graphft.errors import GraphftError
from graphft.runtime.data import BadRecords, open_reader

LARGE = 2**53 + 1
"""No float64 holds it."""


def jsonl(path: Path, values: list[Any], dtype: str) -> DataSpec:
    """One column of numbers, as one chunk; a value that is a JSON text itself (bytes) is a whole line."""
    lines = [v if isinstance(v, bytes) else json.dumps({"c": v}).encode() for v in values]
    path.write_bytes(b"\n".join(lines))
    return files(str(path), "jsonl", {"c": "c"}, {"c": dtype}, chunk_size=len(values))


def read(spec: DataSpec) -> tuple[list[float], dict[int, str]]:
    """The good values of the only chunk; by position, the message for the bad ones."""
    reader, (chunk,) = open_reader(spec, ".", seed=0), spec.chunks
    try:
        return sorted(reader.batch(0, 0, 0, chunk.records)["c"].tolist()), {}
    except BadRecords as error:
        found = reader.batch(0, 0, 0, chunk.records, error.positions)["c"].tolist()
        return sorted(found), dict.fromkeys(error.positions, str(error))


def test_large_integers_of_json_beside_a_float(tmp_path: Path) -> None:
    assert read(jsonl(tmp_path / "f", [LARGE, 1, 2, 3.0], "int64")) == ([1, 2, 3, LARGE], {})


@pytest.mark.parametrize("kind", [pyarrow.int64(), pyarrow.dictionary(pyarrow.int32(), pyarrow.int64())])
def test_large_integers_of_parquet_beside_a_null(kind: pyarrow.DataType, tmp_path: Path) -> None:
    values = pyarrow.array([LARGE, 1, None, *range(2, 302)], pyarrow.int64())
    column = values.dictionary_encode() if pyarrow.types.is_dictionary(kind) else values
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "f")
    found, bad = read(files(str(tmp_path / "f"), "parquet", {"c": "c"}, {"c": "int64"}))
    assert found == [*range(1, 302), LARGE]
    assert list(bad) == [2]


@pytest.mark.parametrize(
    ("values", "dtype", "found"),
    [
        (["1.5", True, 2], "float32", [1, 1.5, 2]),
        (["7", 8.0, True], "int64", [1, 7, 8]),
        ([None, "1", False], "float64", [0, 1]),
    ],
)
def test_values_that_fit_one_by_one_fit_together(
    values: list[Any], dtype: str, found: list[float], tmp_path: Path
) -> None:
    read_values, bad = read(jsonl(tmp_path / "f", values, dtype))
    assert [v for v in read_values if v == v] == found
    assert bad == {}


@pytest.mark.parametrize("beside", [["1.5", True], ["7", 8.0]])
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("red", "field c is 'red', no float32"),
        ("1_5", "field c is '1_5', no float32"),
        ("\uff11", "field c is '\uff11', no float32"),
        ([1], "field c is [1], no float32"),
        (10**400, "no float32"),
        (b"[" * 100_000, "it is no JSON: it is nested too deeply"),
        (b'{"c": ', "it is no JSON"),
    ],
)
def test_a_bad_value_costs_itself(bad: Any, words: str, beside: list[Any], tmp_path: Path) -> None:
    values = [float(i) for i in range(300)]
    values[200:202] = beside
    values[250] = bad
    found, wrong = read(jsonl(tmp_path / "f", values, "float32"))
    assert len(found) == 299
    assert list(wrong) == [250]
    assert words in wrong[250]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["", " 7 ", "1e3", "-0", "nan", "inf", "1_5", "\u0661", str(LARGE), str(2**64)]),
    st.lists(st.integers(), max_size=2),
)


@given(st.lists(SCALARS, max_size=8), st.sampled_from(["float32", "float64", "int64", "int8", "uint8", "bool"]))
def test_a_column_is_its_values_one_by_one(values: list[Any], dtype: str) -> None:
    good = [v for v in values if fits(v, dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = numbers(good, dtype, "c")
        alone = [numbers([v], dtype, "c") for v in good]
    assert together.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(together, np.concatenate([np.zeros(0, dtype), *alone]))
    if np.dtype(dtype).kind != "f":
        assert [int(n) for n in together] == [int(v) for v in good]


@pytest.mark.parametrize("value", [2.0**63, -(2.0**64), 0.5, np.inf, np.nan])
def test_an_array_of_floats_that_no_integer_holds(value: float) -> None:
    with pytest.raises(GraphftError, match="field c has values that are no int64"):
        numbers(np.array([1.0, value]), "int64", "c")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("format", ["csv", "jsonl"])
@pytest.mark.filterwarnings("error")
def test_infinite_values_are_told(format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = ["1.5"] * 300
    values[6], values[7], values[8], values[9] = "1e39", "1e400", "-1e39", "2.5"
    if format == "csv":
        values[9] = "-inf"
    texts = [f'{{"c": {v}}}' for v in values] if format == "jsonl" else ["c", *values]
    (tmp_path / "f").write_text("\n".join(texts))
    spec = files(str(tmp_path / "f"), format, {"c": "c"}, chunk_size=300)
    (warning,) = told(caplog)
    count, line = ("3", 7) if format == "jsonl" else ("4", 8)
    assert f"field c is infinite, or too large for float32, in {count} of 101 records looked at" in warning
    assert f"first in line {line}, and is read as infinite" in warning
    assert sum(np.isinf(read(spec)[0])) == int(count)
    caplog.clear()
    files(str(tmp_path / "f"), format, {"c": "c"}, {"c": "float64"}, chunk_size=300)
    (warning,) = told(caplog)
    assert f"too large for float64, in {int(count) - 2} of 101" in warning


@pytest.mark.parametrize("text", ["1_5", "\uff11\uff12"])
def test_texts_that_only_python_takes_for_numbers_are_told(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = ["c", *["1"] * 299, text]
    (tmp_path / "f").write_text("\n".join(values))
    spec = files(str(tmp_path / "f"), "csv", {"c": "c"}, {"c": "int64"}, chunk_size=300)
    assert f"line 301: field c is {text!r}, expected int64" in told(caplog)[0]
    assert list(read(spec)[1]) == [299]


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_compressed_files_are_named_and_can_be_read(format: str, tmp_path: Path) -> None:
    text = "\n".join(["c", *map(str, range(300))] if format == "csv" else [f'{{"c": {i}}}' for i in range(300)])
    (tmp_path / "f.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(GraphftError, match=r"f\.gz is compressed \(gzip\), expected text") as caught:
        files(str(tmp_path / "f.gz"), format, {"c": "c"})
    assert 'storage_options={"compression": "gzip"}' in caught.value.help
    options = {"compression": "gzip"}
    spec = files(str(tmp_path / "f.gz"), format, {"c": "c"}, chunk_size=300, storage_options=options)
    assert read(spec) == (list(range(300)), {})
