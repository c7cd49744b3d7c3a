"""Describing files tells of bad records: an error that names all bad fields, or a short warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow
import pytest

from graphft.data import DataSpec, files
from graphft.errors import GraphftError
from tests.data.test_files import parquet

GOOD = [f"{i}.5,{i}" for i in range(300)]


def described(path: Path, content: bytes, format: str = "csv", chunk_size: int = 50) -> DataSpec:
    path.write_bytes(content)
    return files(str(path), format, {"a": "a", "y": "y"}, {"y": "int64"}, chunk_size)


def csv_with(rows: dict[int, str]) -> bytes:
    """300 good records, those at the given lines replaced. Line 1 is the header."""
    lines = ["a,y", *GOOD]
    for line, row in rows.items():
        lines[line - 1] = row
    return "\n".join(lines).encode()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("red,{i}", "field a is 'red', no float32"),
        ("1.5,", "field y is empty, no int64"),
        ('1.5,{i},"x,y"', "it has 3 fields, the header 2"),
    ],
)
def test_a_csv_file_that_is_bad_throughout(row: str, words: str, tmp_path: Path) -> None:
    text = csv_with({line: row.format(i=line) for line in range(7, 302)})
    with pytest.raises(GraphftError) as caught:
        described(tmp_path / "f.csv", text)
    assert caught.value.rule == "data"
    assert caught.value.message == f"295 of 300 records cannot be read: line 7 of f.csv: {words}"


def test_all_bad_fields_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(GraphftError) as caught:
        described(tmp_path / "f.csv", csv_with({9: "red,1", 10: "1,blue", 11: "1,2,3", 12: "green,"}))
    for words in (
        "4 of 300",
        "line 9 of f.csv: field a is 'red'",
        "line 10 of f.csv: field y is 'blue'",
        "line 11 of f.csv: it has 3",
    ):
        assert words in caught.value.message
    with pytest.raises(GraphftError) as caught:
        described(tmp_path / "f.parquet", parquet({"a": ["x"], "y": pyarrow.array([1], "timestamp[ms]")}), "parquet")
    assert caught.value.message == "f.parquet: field a is string, no float32; field y is timestamp[ms], no int64"


@pytest.mark.parametrize(("line", "row"), [(177, "red,1"), (301, "1.5")])
def test_a_single_bad_record_is_a_warning(
    line: int, row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert described(tmp_path / "f.csv", csv_with({line: row})).records == 300
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(f"1 of 300 records cannot be read: line {line} of f.csv: ")
    assert warning.endswith("; they will be discarded")


@pytest.mark.parametrize("first", ["a,y,caf\xe9\n".encode("latin-1"), "a,y\n1,2\n".encode("utf-16")])
def test_a_header_in_another_encoding(first: bytes, tmp_path: Path) -> None:
    with pytest.raises(GraphftError) as caught:
        described(tmp_path / "f.csv", first)
    assert caught.value.rule == "encoding"
