"""Quotes in CSV files: well-formed files have the records that pandas finds; a stray quote costs its own line only."""

from __future__ import annotations

import csv
import io
import logging
import tempfile
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphft.data import DataSpec, files
from graphft.data.formats import QUOTED_BYTES
from graphft.runtime.data import BadRecords, open_reader

CHUNK = 7


def described(path: Path, text: str | bytes, chunk_size: int = CHUNK) -> DataSpec:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return files(str(path), "csv", {"x": "id"}, {"x": "int64"}, chunk_size)


def read(spec: DataSpec) -> tuple[list[int], dict[int, str]]:
    """The ids of the records that are good; of the others, by number in the data, what is wrong."""
    reader, found, bad = open_reader(spec, ".", seed=0), [], {}
    for chunk in spec.chunks:
        try:
            found += reader.batch(0, chunk.id, 0, chunk.records)["x"].tolist()
        except BadRecords as error:
            bad |= {chunk.start + p: str(error) for p in error.positions}
            if len(error.positions) < chunk.records:
                found += reader.batch(0, chunk.id, 0, chunk.records, error.positions)["x"].tolist()
    return sorted(found), bad


def with_line(number: int, line: str, quoted: bool = False) -> str:
    """3,000 records of an id and a text; `line`: what stands in the place of one."""
    rows = [f'{i},"part {i}"\n' if quoted else f"{i},part {i}\n" for i in range(3000)]
    rows[number] = line
    return "id,text\n" + "".join(rows)


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("line", ['1000,"5 inch pipe\n', '1000,"5" pipe"\n', '1000,"pipe" \n', '"1000,pipe\n'])
def test_a_stray_quote_costs_its_own_line(
    line: str, quoted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = described(tmp_path / "f.csv", with_line(1000, line, quoted), chunk_size=100)
    (told,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert told.startswith("1 of 3,000 records cannot be read: line 1,002 of f.csv: ")
    found, bad = read(spec)
    assert found == [i for i in range(3000) if i != 1000]
    assert list(bad) == [1000]


@pytest.mark.parametrize("last", ['2999,"5 inch\n', '2999,"5 inch'])
def test_a_stray_quote_in_the_last_line(last: str, tmp_path: Path) -> None:
    found, bad = read(described(tmp_path / "f.csv", with_line(2999, last), chunk_size=100))
    assert found == list(range(2999))
    assert list(bad) == [2999]


def test_a_quote_inside_an_unquoted_field_is_a_character(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found, bad = read(described(tmp_path / "f.csv", with_line(1000, '1000,5" pipe\n'), chunk_size=100))
    assert (found, bad) == (list(range(3000)), {})
    assert not caplog.records


def test_a_quote_without_its_partner_is_looked_for_in_a_part_of_the_file_only(tmp_path: Path) -> None:
    """Also where every field is short, so that none is longer than the csv module takes."""
    line = f"{'1,x' + ',x' * 9}\n"
    rows = [line] * (3 * QUOTED_BYTES // len(line))
    rows[5] = "2," + '"",' * 8 + '"x\n'
    spec = described(tmp_path / "f.csv", "id" + ",n" * 10 + "\n" + "".join(rows), chunk_size=100_000)
    found, bad = read(spec)
    assert len(found) == len(rows) - 1
    assert list(bad) == [5]


def test_a_quoted_field_of_several_lines_that_ends_with_another_number_of_fields(tmp_path: Path) -> None:
    """Two stray quotes: together they look like one field."""
    rows = [f"{i},part\n" for i in range(3000)]
    rows[1000], rows[1004] = '1000,"part\n', '1004,x,",5\n'
    found, bad = read(described(tmp_path / "f.csv", "id,text\n" + "".join(rows), chunk_size=100))
    assert found == [i for i in range(3000) if i not in (1000, 1004)]
    assert sorted(bad) == [1000, 1004]


@pytest.mark.parametrize("line", ["\u00a0\n", '" "\n', "\x1c\n", "1000,a\rb\n", '"1000",a\rb\n'])
def test_a_line_that_is_no_record_costs_itself(line: str, tmp_path: Path) -> None:
    found, bad = read(described(tmp_path / "f.csv", with_line(1000, line), chunk_size=100))
    assert found == [i for i in range(3000) if i != 1000]
    assert list(bad) == [1000]


@pytest.mark.parametrize("blank", ["\n", " \t\n", "\r\n", "\x0b\x0c\n"])
def test_blank_lines_are_no_records(blank: str, tmp_path: Path) -> None:
    assert read(described(tmp_path / "f.csv", with_line(1000, blank), chunk_size=100)) == (
        [i for i in range(3000) if i != 1000],
        {},
    )


def test_long_fields(tmp_path: Path) -> None:
    """Where a field ends without quotes is plain, however long it is."""
    found, bad = read(described(tmp_path / "f.csv", with_line(1000, f"1000,{'x' * 140_000}\n"), chunk_size=100))
    assert (found, bad) == (list(range(3000)), {})
    found, bad = read(described(tmp_path / "f.csv", with_line(1000, f'1000,"{"x" * 140_000}"\n'), chunk_size=100))
    assert found == [i for i in range(3000) if i != 1000]
    assert list(bad) == [1000]


def test_carriage_returns_at_the_ends_of_lines(tmp_path: Path) -> None:
    for end in ("\r\n", "\r\r\n"):
        text = with_line(7, '7,"a ""quote"" and, as it were, a\nline end"\n').replace("\n", end)
        assert read(described(tmp_path / "f.csv", text, chunk_size=100)) == (list(range(3000)), {})


TEXTS = st.text(st.sampled_from('ab,"\n \r7é'), max_size=8)
TABLES = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=30)


def written(texts: list[tuple[str, str]], quoting: int) -> str:
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n", quoting=quoting)  # type: ignore[arg-type]
    writer.writerow(("note", "id", "text"))
    writer.writerows((note, i, text) for i, (note, text) in enumerate(texts))
    return out.getvalue()


@given(TABLES, st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]))
def test_well_formed_files_are_read_as_pandas_reads_them(texts: list[tuple[str, str]], quoting: int) -> None:
    text = written(texts, quoting)
    with tempfile.TemporaryDirectory() as folder:
        spec = described(Path(folder) / "f.csv", text)
        assert spec.records == len(pandas.read_csv(io.StringIO(text, newline=""))) == len(texts)
        assert read(spec) == (list(range(len(texts))), {})


WORDS = st.just("") | st.builds(str.__add__, st.sampled_from("ab"), TEXTS)
"""Texts that begin with a letter: so a quote in front of one never looks like a field's end."""


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=30), st.booleans(), st.data())
def test_one_stray_quote_anywhere_costs_no_other_record(
    texts: list[tuple[str, str]], quoted: bool, data: st.DataObject
) -> None:
    quoting = csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
    struck = data.draw(st.integers(0, len(texts) - 1), "record")
    before, whole = (len(written(texts[:n], quoting)) for n in (struck, struck + 1))
    place = data.draw(st.integers(before, whole - 1), "place")
    text = written(texts, quoting)
    others = [i for i in range(len(texts)) if i != struck]
    with tempfile.TemporaryDirectory() as folder:
        good = "b,1000000,b\n" * 3000  # so many that the rest of the struck record is less than 1 % of all
        spec = described(Path(folder) / "f.csv", text[:place] + '"' + text[place:] + good, chunk_size=len(texts) + 3000)
        found, bad = read(spec)
    assert [i for i in found if i in others] == others
    assert struck in found or bad
    assert found.count(1_000_000) == 3000
