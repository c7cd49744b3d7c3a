"""What is told of files when they are described: with file, line and field, what was expected, and what to do."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from graphft.data import DataSpec, arrays
from graphft.data_files import files
from graphft.errors import GraphftError

GOOD = [f"{i}.5,{i}" for i in range(300)]
COLUMNS = {"a": "a", "y": "y"}
DTYPES = {"y": "int64"}


def described(path: Path, content: bytes, format: str = "csv", chunk_size: int = 50) -> DataSpec:
    path.write_bytes(content)
    return files(str(path), format, COLUMNS, DTYPES, chunk_size)


def csv_with(rows: dict[int, str]) -> bytes:
    """300 good records, those at the given lines replaced. Line 1 is the header."""
    lines = ["a,y", *GOOD]
    for line, row in rows.items():
        lines[line - 1] = row
    return "\n".join(lines).encode()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_good_files_are_described_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert described(tmp_path / "f.csv", csv_with({})).records == 300
    text = "\n".join(json.dumps({"a": i + 0.5, "y": i}) for i in range(300)).encode()
    assert described(tmp_path / "f.jsonl", text, "jsonl").records == 300
    assert described(tmp_path / "f.parquet", parquet(a=[0.5, 1.5], y=[0, 1]), "parquet").records == 2
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("red,{i}", "field a is 'red', expected float32"),
        ("NA,{i}", "field a is 'NA' (a missing value is an empty field), expected float32"),
        ("1.5,2020-01-02", "field y is '2020-01-02', expected int64"),
        ("1.5,", "field y is empty, expected int64"),
        ("1.5,2.5", "field y is '2.5', expected int64"),
        ("1.5", "it has 1 fields, the header 2"),
        ("1.5,{i},", "it has 3 fields, the header 2"),
        ('1.5,{i},"x,y"', "it has 3 fields, the header 2"),
    ],
)
def test_a_csv_file_that_is_bad_throughout(row: str, words: str, tmp_path: Path) -> None:
    text = csv_with({line: row.format(i=line) for line in range(7, 302)})
    with pytest.raises(GraphftError) as caught:
        described(tmp_path / "f.csv", text)
    assert f"{tmp_path}/f.csv, line 7: {words} (" in caught.value.message
    assert caught.value.rule == "data"
    assert "drop" in caught.value.help


@pytest.mark.parametrize(
    ("line", "row", "words"),
    [
        (51, "red,50", "line 51: field a is 'red'"),  # the last record of a chunk
        (252, "red,251", "line 252: field a is 'red'"),  # the first of another
        (301, "red,300", "line 301: field a is 'red'"),  # the last of the file
        (177, "1.5", "line 177: it has 1 fields"),  # in the middle of a chunk
        (177, "1.5,2,3", "line 177: it has 3 fields"),
    ],
)
def test_a_single_bad_record_is_a_warning(
    line: int, row: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert described(tmp_path / "f.csv", csv_with({line: row})).records == 300
    (warning,) = warnings(caplog)
    assert f"f.csv, {words}" in warning
    assert "reading it will fail" in warning


def test_lines_count_those_inside_of_quotes(tmp_path: Path) -> None:
    text = b'note,a,y\n"one\ntwo\n",1,2\n,3,4\n\n,red,5\n'
    with pytest.raises(GraphftError, match=r"f\.csv, line 7: field a is 'red'"):
        described(tmp_path / "f.csv", text)


def test_empty_fields_of_floats_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    described(tmp_path / "f.csv", csv_with({3: ",1", 9: "nan,7"}))
    (warning,) = warnings(caplog)
    assert "f.csv: field a is empty in 2 of 108 records looked at, first in line 3, and is read as NaN" in warning


@pytest.mark.parametrize(
    ("content", "line", "likely"),
    [
        (csv_with({177: "caf\xe9,1"}).decode().encode("latin-1"), 177, "ISO-8859-1"),
        ("a,y\n1,2\n".encode("utf-16"), 1, "UTF-16"),
        (b"a,y,\x93note\x94\n1,2,3\n", 1, "WINDOWS-1252"),
    ],
)
def test_another_encoding(content: bytes, line: int, likely: str, tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match=rf"f\.csv, line {line}: byte .* is no UTF-8") as caught:
        described(tmp_path / "f.csv", content)
    assert caught.value.rule == "encoding"
    assert f"iconv -f {likely} -t UTF-8" in caught.value.help


def test_another_separator_is_named(tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match="has no field a, y") as caught:
        described(tmp_path / "f.csv", b"a;y\n1;2\n")
    assert "here by ';'" in caught.value.help


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ('{"a": "red", "y": 1}', "line 2: field a is 'red', expected float32"),
        ('{"a": 1.5, "y": null}', "line 2: field y is empty, expected int64"),
        ('{"a": 1.5}', "line 2: field y is empty, expected int64"),
        ('{"a": [1, 2], "y": 1}', r"line 2: field a is \[1, 2\], expected float32"),
        ("[1, 2]", "line 2: it is no JSON object, but of type list"),
        ('{"a": 1.5', "line 2: it is no JSON: Expecting ',' delimiter"),
    ],
)
def test_json_lines(record: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match=words):
        described(tmp_path / "f.jsonl", f'{{"a": 1, "y": 2}}\n{record}\n'.encode(), "jsonl")


def parquet(**table: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), out, row_group_size=100)
    return out.getvalue()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"a": ["1", "red"], "y": [0, 1]}, r"field a is string, expected numbers for float32; record 1 has 'red'"),
        ({"a": pyarrow.array(["x", "x"]).dictionary_encode(), "y": [0, 1]}, "field a is dictionary.* record 0 has 'x'"),
        ({"a": [["x"], ["y"]], "y": [0, 1]}, r"field a is list.*, expected numbers for float32"),
        ({"a": pyarrow.array([1, 2], "timestamp[s]"), "y": [0, 1]}, r"field a is timestamp.*, expected numbers"),
        ({"a": [0.5] * 300, "y": [None] * 4 + [1] * 296}, "field y is null in 4 of 300 records, expected int64"),
    ],
)
def test_parquet(table: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match=rf"f\.parquet: {words}") as caught:
        described(tmp_path / "f.parquet", parquet(**table), "parquet")
    assert caught.value.rule == "data"


def test_nulls_that_parquet_files_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = {"a": [None] * 200 + [0.5] * 100, "y": [1] * 299 + [None]}
    described(tmp_path / "f.parquet", parquet(**table), "parquet")
    floats, integers = warnings(caplog)
    assert "field a is null in 200 of 300 records, and is read as NaN" in floats
    assert "field y is null in 1 of 300 records, expected int64: reading them will fail" in integers


def test_numbers_that_parquet_files_hold_as_words_are_read(tmp_path: Path) -> None:
    assert described(tmp_path / "f.parquet", parquet(a=["1.5", "2"], y=["0", "1"]), "parquet").records == 2


def test_npy_of_objects(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([None, "red"], dtype=object), allow_pickle=True)
    with pytest.raises(GraphftError, match=r"column x \(.*/x\.npy\) has dtype object, which is no tensor's"):
        files({"x": str(tmp_path / "x.npy")}, "npy")


def test_arrays_with_values_that_are_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = np.ones((300, 2), np.float32)
    x[7, 1], x[250, 0] = np.nan, np.inf
    arrays(x=x, y=np.arange(300))
    (told,) = warnings(caplog)
    assert "column x: 2 of 300 records hold a value that is not finite, first record 7: fill it" in told
    caplog.clear()
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.zeros((300, 0), np.float16))
    files({"x": str(tmp_path / "x.npy"), "y": str(tmp_path / "y.npy")}, "npy")
    (told,) = warnings(caplog)
    assert f"{tmp_path / 'x.npy'}: 1 of 100 records hold a value that is not finite, first record 7" in told
    assert "(the first 100 of 300 were looked at)" in told
