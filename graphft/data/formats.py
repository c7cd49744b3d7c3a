"""Decodes records of files: CSV and Parquet, by field and as numbers.

Describing a file and reading a chunk of it use the same functions, so both see the same records. A record of CSV is a
line; pyarrow gets the good ones only, as it stops at others.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from graphft.errors import GraphftError, UsageError

OPEN_QUOTE = "a quoted field does not end on its line"
"""A line of CSV that makes the lines behind it doubtful: the file is refused."""

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
    """Returns the field names in a CSV file's first line. Raises UsageError[encoding] if it is not in UTF-8."""
    try:
        return next(csv.reader([line.decode("utf-8-sig").rstrip("\r\n")]), [])
    except UnicodeDecodeError:
        help = 'if it is compressed, give storage_options={"compression": "infer"} (each chunk then decompresses the '
        help += "file); or convert it: iconv -f ISO-8859-1 -t UTF-8 FILE > NEW"
        raise UsageError(f"{url}: its first line is no text in UTF-8", rule="encoding", help=help) from None


def csv_error(line: bytes, width: int) -> str:
    """Returns what is wrong with a record of CSV, or "". The header has `width` fields; quotes are those of Python's
    csv module, pandas and RFC 4180."""
    if b'"' in line:
        text = line.decode(errors="replace")
        lenient = csv.reader([text, ""])
        try:
            next(lenient)
            if lenient.line_num > 1:
                return OPEN_QUOTE
            found = len(next(csv.reader([text], strict=True)))
        except csv.Error:
            return "its quotes don't fit (a quote in a quoted field is doubled)"
    elif line.find(b"\r", 0, -2) >= 0 and b"\r" in line.rstrip(b"\r\n"):
        return "it has a carriage return (\\r) in the middle"
    else:
        found = line.count(b",") + 1
    return "" if found == width else f"it has {found} fields, the header {width}"


def decode_csv(lines: Iterable[bytes], header: Sequence[str], dtypes: Mapping[str, str]) -> Decoded:
    """Decodes those lines that are not blank. `dtypes`: those of the fields that are wanted."""
    records = [line for line in lines if not line.isspace()]
    wrong = {i: csv_error(line, len(header)) for i, line in enumerate(records)}
    decoded = Decoded({i: {"": text} for i, text in wrong.items() if text})
    texts = _csv_texts(records, header, dtypes, wrong)
    for name, dtype in dtypes.items():
        decoded.add(name, texts[name], dtype)
    return decoded


def _csv_texts(lines: Sequence[bytes], header: Sequence[str], fields: Iterable[str], wrong: Mapping[int, str]) -> Any:
    """Returns a pyarrow table of texts; null where a field is empty, or its record bad."""
    import pyarrow
    import pyarrow.csv

    nothing = b'""' + b"," * (len(header) - 1) + b"\n"
    data = b"".join([nothing if wrong[i] else line for i, line in enumerate(lines)])
    if not data.isascii():
        data = data.decode(errors="replace").encode()
    return pyarrow.csv.read_csv(
        pyarrow.BufferReader(data),
        pyarrow.csv.ReadOptions(column_names=header, use_threads=False, block_size=len(data) + 1),
        pyarrow.csv.ParseOptions(),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(fields, pyarrow.string()),
            include_columns=list(fields),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


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
