"""A look at the records of CSV and JSON lines files while they are indexed: what reading them would fail at, or lose.

Every record of a CSV file is looked at for its encoding, its quotes and its number of fields. The values of the first
`FIRST` records of each file are looked at, and of the first and the last record of each chunk. So a column of words is
found at once, and a file of a terabyte is not parsed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphft.data_numbers import fits, is_infinite
from graphft.data_records import Record, csv_fields, json_fields, no_utf8
from graphft.errors import UsageError

log = logging.getLogger("graphft")

FIRST = 100
BAD_SHARE = 0.01
"""More bad records than this share are an error, fewer a warning: a job leaves out what it cannot read."""
LOOKED_AT = f"the values of the first {FIRST} records of a file, and of the first and last of each chunk, are looked at"
_WORDS_FOR_NONE = frozenset({"na", "n/a", "null", "none", "-", "?", "nil", "missing"})


@dataclass
class _Bad:
    """How many records are bad, and the first of them in words."""

    count: int = 0
    first: str = ""

    def found(self, line: int, what: str) -> None:
        self.count += 1
        self.first = self.first or f"line {line:,}: {what}"


class Look:
    """One file's records, in order. `dtypes`: of the fields that are wanted. Line numbers count from 1."""

    def __init__(self, url: str, dtypes: Mapping[str, str], line: int = 1) -> None:
        self.url, self.dtypes, self.line = url, dtypes, line
        self.records = self.looked = 0
        self.malformed, self.bad = _Bad(), _Bad()
        self.empty: dict[str, tuple[int, int]] = {}
        """How often a field is empty, and the first line."""
        self.infinite: dict[str, tuple[int, int]] = {}
        """How often it is infinite, or too large for its dtype."""
        self._last: tuple[Record, int] | None = None

    def at(self, record: Record, edge: bool) -> None:
        """Takes the next record in; `edge`: it is the first or the last of its chunk."""
        raw, _, wrong = record
        if not raw.isspace():
            self.records += 1
            if not raw.isascii():
                self._check_encoding(raw)
            if wrong:
                self.malformed.found(self.line, wrong)
                self._last = None  # its values are not looked at
            elif edge or self.looked < FIRST:
                self._last = None
                self._values(record, self.line)
            else:
                self._last = record, self.line
        self.line += raw.count(b"\n")

    def end(self) -> None:
        """Tells what was found. Raises GraphftError[data] if too many records are bad."""
        if self._last is not None:
            self._values(*self._last)
        for field, (count, line) in self.empty.items():
            log.warning(
                "%s: field %s is empty in %s of %s records looked at, first in line %s, and is read as NaN: fill it, "
                "drop these records, or have the model handle NaN (%s)",
                *(self.url, field, f"{count:,}", f"{self.looked:,}", f"{line:,}", LOOKED_AT),
            )
        for field, (count, line) in self.infinite.items():
            log.warning(
                "%s: field %s is infinite, or too large for %s, in %s of %s records looked at, first in line %s, and "
                "is read as infinite: correct it, drop these records, or choose a larger dtype (%s)",
                *(self.url, field, self.dtypes[field], f"{count:,}", f"{self.looked:,}", f"{line:,}", LOOKED_AT),
            )
        self._tell(
            self.malformed,
            self.records,
            "correct these records, or drop them: a value that holds a comma or a line end is quoted, a quote inside "
            "of quotes is doubled, and a comma at the end of a line begins one field more; every record is looked at "
            "for its quotes and its number of fields",
        )
        self._tell(
            self.bad,
            self.looked,
            "convert the field to numbers (one number for each category), fill what is missing, drop these records, "
            f"choose another dtype for the column, or leave the field out of columns; {LOOKED_AT}",
        )

    def _tell(self, bad: _Bad, of: int, remedy: str) -> None:
        """Bad records among `of`."""
        if not bad.count:
            return
        what = f"{self.url}, {bad.first} ({bad.count:,} of {of:,} records looked at are bad)"
        if bad.count > BAD_SHARE * of:
            raise UsageError(what, rule="data", help=remedy)
        log.warning("%s: reading it will fail; %s", what, remedy)

    def _check_encoding(self, raw: bytes) -> None:
        """Raises GraphftError if all records are looked at for their encoding, and this one is no UTF-8."""

    def _fields(self, record: Record) -> Mapping[str, Any]:
        """The record's fields by name; None where one is empty. Raises ValueError."""
        raise NotImplementedError

    def _values(self, record: Record, line: int) -> None:
        self.looked += 1
        try:
            fields = self._fields(record)
        except ValueError as error:
            self.bad.found(line, str(error))
            return
        empty, infinite = [], []
        for name, dtype in self.dtypes.items():
            value, floating = fields.get(name), np.dtype(dtype).kind == "f"
            if floating and _is_missing(value):
                empty.append(name)
            elif not fits(value, dtype):
                self.bad.found(line, f"field {name} {_described(value)}, expected {dtype}")
                return
            elif floating and is_infinite(value, dtype):
                infinite.append(name)
        for counts, names in ((self.empty, empty), (self.infinite, infinite)):
            for name in names:
                count, first = counts.get(name, (0, line))
                counts[name] = count + 1, first


class CsvLook(Look):
    """Records of a CSV file; `header`: its field names."""

    def __init__(self, url: str, dtypes: Mapping[str, str], header: Sequence[str], line: int) -> None:
        super().__init__(url, dtypes, line)
        self.header = header

    def _check_encoding(self, raw: bytes) -> None:
        """No chunk with a record of another encoding can be read."""
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            raise no_utf8(self.url, self.line, error) from None

    def _fields(self, record: Record) -> Mapping[str, Any]:
        return {name: value or None for name, value in zip(self.header, csv_fields(record), strict=True)}


class JsonLook(Look):
    """Records of a file of JSON lines."""

    def _fields(self, record: Record) -> Mapping[str, Any]:
        try:
            return json_fields(record[0])
        except UnicodeDecodeError as error:
            raise no_utf8(self.url, self.line, error) from None


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value) or str(value).strip().lower() == "nan"


def _described(value: Any) -> str:
    if value is None:
        return "is empty"
    text = repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."
    if str(value).strip().lower() in _WORDS_FOR_NONE:
        return f"is {text} (a missing value is an empty field)"
    return f"is {text}"
