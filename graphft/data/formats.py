"""Decodes records of files: CSV, JSON lines and Parquet, by field and as numbers.

Describing a file and reading a chunk of it use the same functions, so both see the same records. pyarrow decodes CSV
and Parquet. It can't tell where a record of CSV ends in its file, and a stray quote makes it swallow what follows: so
records are divided here, and it gets the good ones. JSON lines are decoded by Python's json module, as pyarrow's reader
fails at the first bad line.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from graphft.errors import GraphftError, UsageError

QUOTED_BYTES = 1 << 17
"""A record with quotes is at most so long: how far a quote without its partner is looked for."""
_JSON = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=str)
"""Numbers stay texts: `to_numbers` converts them as those of CSV."""

Record = tuple[bytes, str]
"""(the bytes with their line end, what is wrong or ""). A plain tuple: a file has millions."""


Bad = dict[int, dict[str, str]]
"""Says what is wrong with records, by position and field ("": it cannot be taken apart)."""


@dataclass
class Decoded:
    """Some records: `fields` has by field an array with a row for each record. Rows of `bad` records mean nothing."""

    bad: Bad
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return len(next(iter(self.fields.values())))

    def add(self, name: str, column: Any, dtype: str, width: int = 1) -> None:
        """Adds a field, with `width` values in each record, one behind the other in `column`."""
        values, wrong = to_numbers(column, dtype)
        self.fields[name] = values.reshape(-1, width)
        for i, value in wrong.items():
            texts = self.bad.setdefault(i // width, {})
            if "" not in texts:
                texts[name] = f"field {name} is {'empty' if value is None else repr(value)}, no {dtype}"


def csv_header(line: bytes, url: str) -> list[str]:
    """Returns the field names in a CSV file's first line."""
    return next(csv.reader([check_text(line, url).decode("utf-8-sig").rstrip("\r\n")]), [])


def check_text(line: bytes, url: str) -> bytes:
    """Returns a file's first line. Raises UsageError[encoding] if it is not in UTF-8, as compressed ones are not."""
    try:
        line.decode()
    except UnicodeDecodeError:
        help = 'if it is compressed, give storage_options={"compression": "infer"} (each chunk then decompresses the '
        help += "file); or convert it: iconv -f ISO-8859-1 -t UTF-8 FILE > NEW"
        raise UsageError(f"{url}: its first line is no text in UTF-8", rule="encoding", help=help) from None
    return line


def csv_records(lines: Iterable[bytes], width: int) -> Iterator[Record]:
    """Divides lines behind a header of `width` fields into records; blank lines are among them.

    Quotes are those of Python's csv module, pandas and RFC 4180. A record that breaks these rules, or has another
    number of fields, is bad: its first line alone, so that a stray quote never swallows what follows. What follows has
    no influence on a good record, so that a range of whole records is divided as the whole file is.
    """
    source, again, commas = iter(lines), deque[bytes](), width - 1
    while line := again.popleft() if again else next(source, b""):
        if b'"' in line:
            taken, wrong = _quoted_record(line, source, again, width)
            yield taken, wrong
        elif line.find(b"\r", 0, -2) >= 0 and b"\r" in line.rstrip(b"\r\n"):
            yield line, "it has a carriage return (\\r) in the middle"
        else:
            found = line.count(b",")
            yield line, "" if found == commas else f"it has {found + 1} fields, the header {width}"


def _quoted_record(line: bytes, source: Iterator[bytes], again: deque[bytes], width: int) -> Record:
    """Returns the record that begins on `line`. Lines that were read in vain are put into `again`."""
    taken: list[bytes] = []

    def following() -> Iterator[str]:
        size, more = 0, line
        while more and size <= QUOTED_BYTES:
            taken.append(more)
            size += len(more)
            yield more.decode(errors="replace")
            more = again.popleft() if again else next(source, b"")
        if more:
            again.appendleft(more)

    try:
        found = len(next(csv.reader(following(), strict=True)))
        wrong = "" if found == width else f"it has {found} fields, the header {width}"
    except csv.Error:
        wrong = "its quotes don't fit (a quote in a quoted field is doubled)"
    record = b"".join(taken)
    if len(record) > QUOTED_BYTES:
        wrong = wrong or f"it has quotes, and more than {QUOTED_BYTES:,} bytes"
    if not wrong:
        return record, ""
    again.extendleft(reversed(taken[1:]))
    return line, wrong


def json_records(lines: Iterable[bytes]) -> Iterator[Record]:
    """Yields the lines as records; blank ones are among them."""
    return ((line, "") for line in lines)


def json_row(line: bytes) -> tuple[dict[str, Any], str]:
    """Returns the fields of a JSON line, numbers as texts; and what is wrong with it, or ""."""
    try:
        row = _JSON.decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return {}, f"it is no JSON: {error}"
    return (row, "") if isinstance(row, dict) else ({}, "it is no JSON object")


def lines_before(records: Sequence[Record]) -> list[int]:
    """Returns for each record that is not blank the number of lines before it."""
    before, found = 0, []
    for raw, _ in records:
        if not raw.isspace():
            found.append(before)
        before += raw.count(b"\n")
    return found


def decode_text(records: Iterable[Record], header: Sequence[str] | None, dtypes: Mapping[str, str]) -> Decoded:
    """Decodes those records of text that are not blank: of JSON lines if there is no `header`, else of CSV. `dtypes`:
    those of the fields that are wanted."""
    kept = [record for record in records if not record[0].isspace()]
    decoded = Decoded({i: {"": wrong} for i, (_, wrong) in enumerate(kept) if wrong})
    texts = _json_texts(kept, dtypes, decoded.bad) if header is None else _csv_texts(kept, header, dtypes)
    for name, dtype in dtypes.items():
        decoded.add(name, texts[name], dtype)
    return decoded


def _csv_texts(records: Sequence[Record], header: Sequence[str], fields: Iterable[str]) -> Any:
    """Returns a pyarrow table of texts; null where a field is empty, or its record bad."""
    import pyarrow
    import pyarrow.csv

    nothing = b'""' + b"," * (len(header) - 1) + b"\n"
    data = b"".join([nothing if wrong else raw for raw, wrong in records])
    if not data.isascii():
        data = data.decode(errors="replace").encode()
    return pyarrow.csv.read_csv(
        pyarrow.BufferReader(data),
        pyarrow.csv.ReadOptions(column_names=header, use_threads=False, block_size=len(data) + 1),
        pyarrow.csv.ParseOptions(newlines_in_values=True),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(fields, pyarrow.string()),
            include_columns=list(fields),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _json_texts(records: Sequence[Record], fields: Iterable[str], bad: Bad) -> dict[str, Any]:
    """Returns by field its values as texts; adds to `bad`."""
    import pyarrow

    found = [json_row(raw) for raw, _ in records]
    bad |= {i: {"": wrong} for i, (_, wrong) in enumerate(found) if wrong}
    return {f: pyarrow.chunked_array([[_text(row.get(f)) for row, _ in found]], pyarrow.string()) for f in fields}


def _text(value: Any) -> str | None:
    if value is None or (type(value) is str and value.isascii()):
        return value
    text = str(int(value)) if type(value) is bool else str(value)
    return text.encode(errors="replace").decode()  # JSON has texts that UTF-8 has not


def to_numbers(column: Any, dtype: str) -> tuple[np.ndarray, dict[int, Any]]:
    """Returns a pyarrow column as `dtype`; and by position the values that are none of it: their entries mean nothing.

    An integer dtype takes integers of its range, and no value is changed: 3.0 is 3, and 3.5 and null are wrong. A
    floating dtype rounds to its nearest number (texts by way of float64), and null is NaN.
    """
    import pyarrow
    import pyarrow.compute

    target, is_text = np.dtype(dtype), pyarrow.types.is_string(column.type)
    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pyarrow.types.is_decimal(column.type):
        column, is_text = column.cast(pyarrow.string()), True  # whose own conversion does not round to the nearest
    if is_text:
        column = pyarrow.compute.ascii_trim_whitespace(column)
    elif target.kind == "f":
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(column).astype(target), {}
    kind = pyarrow.from_numpy_dtype({"f": np.dtype("f8"), "b": np.dtype("u1")}.get(target.kind, target))
    try:
        values = column.cast(kind)
    except pyarrow.ArrowInvalid:
        values = pyarrow.chunked_array([[_number(value, kind) for value in column]], kind)
    null = np.asarray(values.is_null())
    if target.kind == "f":
        null &= np.asarray(column.is_valid())
    values = np.asarray(values.fill_null(np.nan if target.kind == "f" else 0))
    if target.kind == "b":
        null |= values > 1
    with np.errstate(over="ignore"):
        return values.astype(target), {int(i): column[int(i)].as_py() for i in np.flatnonzero(null)}


def _number(value: Any, kind: Any) -> Any:
    """Returns a pyarrow scalar as `kind`; null where it is none."""
    import pyarrow

    for steps in ((kind,), (pyarrow.float64(), kind)):
        try:
            found = value
            for step in steps:
                found = found.cast(step)
            return found.as_py()
        except pyarrow.ArrowInvalid:
            continue
    return None


def open_parquet(file: IO[bytes], url: str) -> Any:
    """Returns a pyarrow.parquet.ParquetFile. Raises GraphftError[format] if it is none."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    except pyarrow.ArrowInvalid as e:
        raise GraphftError(f"{url} is no Parquet file: {e}", rule="format", help="check the format") from e


def decode_parquet(
    opened: Any, start: int, records: int, dtypes: Mapping[str, str], widths: Mapping[str, int]
) -> Decoded:
    """Decodes a range of records. `widths`: how long the lists are, of fields that hold lists."""
    groups: list[int] = []
    first = begin = 0
    for i in range(opened.num_row_groups):
        end = begin + opened.metadata.row_group(i).num_rows
        if begin < start + records and end > start:
            first = first if groups else begin
            groups.append(i)
        begin = end
    table = opened.read_row_groups(groups, columns=list(dtypes), use_threads=False).slice(start - first, records)
    decoded = Decoded({})
    for name, dtype in dtypes.items():
        column, width = table.column(name), widths.get(name, 0)
        decoded.add(name, _flat(column, width, name, decoded.bad) if width else column, dtype, width or 1)
    return decoded


def _flat(lists: Any, width: int, name: str, bad: Bad) -> Any:
    """Returns the values of a column of lists. A null list is one of nulls; one of another length is bad."""
    import pyarrow

    whole = lists.combine_chunks()
    if not lists.null_count and whole.value_lengths().unique().to_pylist() == [width]:
        return pyarrow.chunked_array([whole.flatten()])
    rows = [[None] * width if row is None else row for row in whole.to_pylist()]
    for i, row in enumerate(rows):
        if len(row) != width:
            bad[i], rows[i] = {"": f"field {name} has {len(row)} values, expected {width}"}, [0] * width
    return pyarrow.chunked_array([[value for row in rows for value in row]], getattr(whole.type, "value_type", None))


def is_list(kind: Any) -> bool:
    """True for the type of a Parquet field that holds lists."""
    import pyarrow.types as kinds

    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))
