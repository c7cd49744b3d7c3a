"""CSV files have the records that pandas finds, fields the numbers that Python reads; a bad line costs itself only."""

from __future__ import annotations

import csv
import gzip
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.data import DataSpec, files
from graphft.data.formats import to_numbers
from graphft.errors import GraphftError
from graphft.runtime.data import BadRecords, open_reader


def described(path: Path, text: str, chunk_size: int = 7) -> DataSpec:
    path.write_bytes(text.encode())
    return files(str(path), "csv", {"x": "id"}, {"x": "int64"}, chunk_size)


def read(spec: DataSpec) -> tuple[list[int], list[int]]:
    """The column's values of the records that are good; the numbers of the others in the data."""
    reader, found, bad = open_reader(spec, ".", seed=0), [], list[int]()
    (column,) = spec.columns
    for chunk in spec.chunks:
        try:
            found += reader.batch(0, chunk.id, 0, chunk.records)[column].tolist()
        except BadRecords as error:
            bad += [chunk.start + p for p in error.positions]
            if len(error.positions) < chunk.records:
                found += reader.batch(0, chunk.id, 0, chunk.records, error.positions)[column].tolist()
    return sorted(found), bad


def with_line(number: int, line: str) -> str:
    """3,000 records of an id and a text; `line`: what stands in the place of one."""
    rows = [f'{i},"part {i}"\n' if i % 2 else f"{i},part {i}\n" for i in range(3000)]
    rows[number] = line
    return "id,text\n" + "".join(rows)


@pytest.mark.parametrize(
    "line", ['1000,"5" pipe"\n', '1000,"pipe" \n', "\u00a0\n", '" "\n', "1000,a\rb\n", '"1000",a\rb\n', "1,2,3\n"]
)
def test_a_line_that_is_no_record_costs_itself(line: str, tmp_path: Path) -> None:
    found, bad = read(described(tmp_path / "f.csv", with_line(1000, line), chunk_size=100))
    assert found == [i for i in range(3000) if i != 1000]
    assert bad == [1000]


@pytest.mark.parametrize("line", ['1000,"5 inch pipe\n', '"1000,pipe\n', '1000,"two\n1001,lines"\n'])
@pytest.mark.parametrize("at", [1000, 2999])
def test_a_field_that_does_not_end_on_its_line_is_refused(line: str, at: int, tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match=rf"line {at + 2:,} of f\.csv") as caught:
        described(tmp_path / "f.csv", with_line(at, line))
    assert (caught.value.rule, bool(caught.value.help)) == ("data", True)


@pytest.mark.parametrize("blank", ["\n", " \t\n", "\r\n", "\x0b\x0c\n"])
def test_blank_lines_are_no_records(blank: str, tmp_path: Path) -> None:
    text = "id,text\r\n" + "".join(f"{i},a\r\n{blank}" for i in range(20))
    assert read(described(tmp_path / "f.csv", text)) == ([*range(20)], [])


@given(
    texts=st.lists(st.tuples(*[st.text(st.sampled_from('a",;é '), max_size=6)] * 2), min_size=1, max_size=12),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
)
def test_well_formed_files_are_read_as_pandas_reads_them(texts: list[tuple[str, str]], quoting: int) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=quoting)  # type: ignore[arg-type]
    writer.writerow(["text", "id", "more"])
    writer.writerows([[one, i, other] for i, (one, other) in enumerate(texts)])
    with tempfile.TemporaryDirectory() as folder:
        found, bad = read(described(Path(folder) / "f.csv", out.getvalue()))
    assert (found, bad) == (pandas.read_csv(io.StringIO(out.getvalue()))["id"].tolist(), [])


LARGE = 2**53 + 1
"""No float64 holds it."""


@pytest.mark.parametrize("kind", [pyarrow.int64(), pyarrow.dictionary(pyarrow.int32(), pyarrow.int64())])
def test_large_integers_of_parquet_beside_a_null(kind: pyarrow.DataType, tmp_path: Path) -> None:
    values = pyarrow.array([LARGE, 1, None, *range(2, 302)], pyarrow.int64())
    column = values.dictionary_encode() if pyarrow.types.is_dictionary(kind) else values
    pyarrow.parquet.write_table(pyarrow.table({"c": column}), tmp_path / "f")
    found, bad = read(files(str(tmp_path / "f"), "parquet", {"c": "c"}, {"c": "int64"}))
    assert found == [*range(1, 302), LARGE]
    assert bad == [2]


TEXTS = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    st.decimals(-(10**9), 10**9, places=12).map(str),
    st.sampled_from(["", " 7 ", "1e3", "-0", "+5", "nan", "inf", "1e400", "1_5", "\u0661", str(LARGE), "3.0", "red"]),
)


def python_number(text: str | None, dtype: np.dtype[Any]) -> Any:
    """As Python reads it, and None where it is no such number."""
    if text is None or not text.isascii() or "_" in text:
        return math.nan if text is None and dtype.kind == "f" else None
    try:
        value = float(text)
        if dtype.kind == "f":
            return value
        whole = int(text) if text.strip().lstrip("+-").isdecimal() else int(value) if value == int(value) else None
    except (ValueError, OverflowError):
        return None
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return whole if whole is not None and low <= whole <= high else None


@given(st.lists(TEXTS, max_size=8), st.sampled_from(["float32", "float64", "int64", "int8", "uint8", "bool"]))
def test_texts_are_the_numbers_that_python_reads(texts: list[str | None], dtype: str) -> None:
    """They agree to the last bit: those of float32 are read by way of float64."""
    values, wrong = to_numbers(pyarrow.chunked_array([texts], pyarrow.string()), dtype)
    wanted = [python_number(text, np.dtype(dtype)) for text in texts]
    assert sorted(wrong) == [i for i, number in enumerate(wanted) if number is None]
    kept = [i for i, number in enumerate(wanted) if number is not None]
    with np.errstate(over="ignore"):
        good = np.array([wanted[i] for i in kept], "float64" if dtype[0] == "f" else dtype).astype(dtype)
    assert values.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(values[kept], good)


def test_compressed_files_are_refused_and_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "f.gz").write_bytes(gzip.compress("\n".join(["c", *map(str, range(300))]).encode()))
    with pytest.raises(Exception, match="no text in UTF-8") as caught:
        files(str(tmp_path / "f.gz"), "csv", {"c": "c"})
    assert 'storage_options={"compression": "infer"}' in str(caught.value)
    options = {"compression": "infer"}
    spec = files(str(tmp_path / "f.gz"), "csv", {"c": "c"}, chunk_size=300, storage_options=options)
    assert read(spec) == (list(range(300)), [])
