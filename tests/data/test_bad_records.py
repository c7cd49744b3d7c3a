"""Bad records of a batch are named, and the others are read without them; describing files tells of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow
import pytest
import torch

import graphft
from graphft.data import DataSpec, files
from graphft.errors import GraphftError
from graphft.runtime.data import BadRecords, BatchKey, Reader, open_reader
from tests.data.test_files import parquet

BATCH = 50


def lines(bad: bytes) -> bytes:
    """200 records (i, 2 i); record 120 is `bad`."""
    return b"".join(bad if i == 120 else f"{i},{2 * i}\n".encode() for i in range(200))


def of_batches(reader: Reader, without: frozenset[int] = frozenset()) -> tuple[list[float], list[BadRecords]]:
    found: list[float] = []
    errors: list[BadRecords] = []
    for batch in range(200 // BATCH):
        try:
            found += reader.batch(0, 0, batch, BATCH, without)["x"].flatten().tolist()
        except BadRecords as error:
            errors.append(error)
    return found, errors


def check(spec: DataSpec, message: str) -> None:
    reader = open_reader(spec, ".", seed=3)
    found, (error,) = of_batches(reader)
    assert len(found) == 150
    assert error.positions == {120}
    assert message in str(error)
    found, errors = of_batches(reader, error.positions)
    assert not errors
    assert sorted(found) == [i for i in range(200) if i != 120]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"red,1\n", "line 122 of f.csv: field x is 'red', no float32"),
        (b"5\n", "line 122 of f.csv: it has 1 fields, the header 2"),
    ],
)
def test_a_line_of_csv(bad: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_bytes(b"x,y\n" + lines(bad))
    check(graphft.files(str(tmp_path / "f.csv"), "csv", {"x": "x"}, {"x": "float32"}, chunk_size=200), message)


class Damaged:
    def __init__(self, many: bool) -> None:
        if many:
            self.__getitems__ = lambda indices: [self[i] for i in indices]

    def __len__(self) -> int:
        return 200

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i == 120:
            raise ValueError("it is damaged")
        return {"x": torch.tensor(float(i))}


@pytest.mark.parametrize("many", [False, True])
def test_a_record_of_a_dataset(many: bool) -> None:
    spec = graphft.dataset(f"{__file__}:Damaged", {"many": many}, ("x",), chunk_size=200)
    check(spec, "of 50 records only 120 cannot be read: ValueError: it is damaged")


def test_lines_are_those_of_an_editor(tmp_path: Path) -> None:
    """They count from 1 in each file; blank ones count. Positions are those in the chunk."""
    bad, good = b'"red",1\n', b'1,"one line"\n\n'
    for name, at in (("one", 1000), ("two", 150)):
        (tmp_path / name).write_bytes(b"x,y\n" + b"".join(bad if i == at else b"\n" + good for i in range(200)))
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    spec = DataSpec.from_json(graphft.files(paths, "csv", {"x": "x"}, chunk_size=100).to_json())
    text = (tmp_path / "two").read_bytes()
    line = text[: text.index(bad)].count(b"\n") + 1
    chunk = next(c for c in spec.chunks if c.file == 1 and c.start <= 150 < c.start + c.records)
    with pytest.raises(BadRecords, match=f"line {line} of two: ") as caught:
        open_reader(spec, ".", seed=3).batch(0, chunk.id, 0, chunk.records)
    assert caught.value.positions == {150 - chunk.start} != {150}


def test_records_are_named_as_a_person_finds_them(tmp_path: Path) -> None:
    """In the data they are counted over all files, in a file by its lines."""
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"x,y\n" + lines(b"120,240\n"))
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    reader = open_reader(graphft.files(paths, "csv", {"x": "x"}, chunk_size=60), ".", seed=3)
    assert sorted(reader.numbers(BatchKey(0, 4, 0, 60))) == list(range(200, 260)), (
        "chunk 4 is the first of the second file"
    )
    assert reader.names([0, 199, 200, 399]) == ["line 2 of one", "line 201 of one", "line 2 of two", "line 201 of two"]
    (tmp_path / "two").unlink()
    assert reader.names([199, 200]) == ["line 201 of one", "record 200"]
    arrays = graphft.arrays(chunk_size=60, x=torch.zeros(200, 1))
    assert open_reader(arrays, ".", seed=3).names([0, 199]) == ["record 0", "record 199"]


GOOD = [f"{i}.5,{i}" for i in range(300)]


def described_at(path: Path, content: bytes, format: str = "csv", chunk_size: int = 50) -> DataSpec:
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
        described_at(tmp_path / "f.csv", text)
    assert caught.value.rule == "data"
    assert caught.value.message == f"295 of 300 records cannot be read: line 7 of f.csv: {words}"


def test_all_bad_fields_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(GraphftError) as caught:
        described_at(tmp_path / "f.csv", csv_with({9: "red,1", 10: "1,blue", 11: "1,2,3", 12: "green,"}))
    for words in (
        "4 of 300",
        "line 9 of f.csv: field a is 'red'",
        "line 10 of f.csv: field y is 'blue'",
        "line 11 of f.csv: it has 3",
    ):
        assert words in caught.value.message
    with pytest.raises(GraphftError) as caught:
        described_at(tmp_path / "f.parquet", parquet({"a": ["x"], "y": pyarrow.array([1], "timestamp[ms]")}), "parquet")
    assert caught.value.message == "f.parquet: field a is string, no float32; field y is timestamp[ms], no int64"


@pytest.mark.parametrize(("line", "row"), [(177, "red,1"), (301, "1.5")])
def test_a_single_bad_record_is_a_warning(
    line: int, row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert described_at(tmp_path / "f.csv", csv_with({line: row})).records == 300
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(f"1 of 300 records cannot be read: line {line} of f.csv: ")
    assert warning.endswith("; they will be discarded")


@pytest.mark.parametrize("first", ["a,y,caf\xe9\n".encode("latin-1"), "a,y\n1,2\n".encode("utf-16")])
def test_a_header_in_another_encoding(first: bytes, tmp_path: Path) -> None:
    with pytest.raises(GraphftError, match=r"^error\[encoding\]"):
        described_at(tmp_path / "f.csv", first)
