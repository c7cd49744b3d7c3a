"""Quotes in CSV files: well-formed files have the records that pandas finds; a bad line costs itself only."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.data import DataSpec, files
from graphft.errors import GraphftError
from graphft.runtime.data import BadRecords, open_reader


def described(path: Path, text: str, chunk_size: int = 7) -> DataSpec:
    path.write_bytes(text.encode())
    return files(str(path), "csv", {"x": "id"}, {"x": "int64"}, chunk_size)


def read(spec: DataSpec) -> tuple[list[int], list[int]]:
    """The ids of the records that are good; the numbers of the others in the data."""
    reader, found, bad = open_reader(spec, ".", seed=0), [], list[int]()
    for chunk in spec.chunks:
        try:
            found += reader.batch(0, chunk.id, 0, chunk.records)["x"].tolist()
        except BadRecords as error:
            bad += [chunk.start + p for p in error.positions]
            if len(error.positions) < chunk.records:
                found += reader.batch(0, chunk.id, 0, chunk.records, error.positions)["x"].tolist()
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
