"""The records of text files, CSV and JSON lines: where each ends, its fields, and what is wrong with it.

Describing a file and reading a chunk of it use the same functions, so both see the same records.

CSV is quoted as Python's csv module, pandas and RFC 4180 have it. A quote at a field's beginning opens it, and anywhere
else in an unquoted field it is a character. Inside of quotes commas and line ends belong to the field, and a quote is
doubled. Behind the closing quote comes a comma or the line's end. A line on which a quoted field begins that breaks
this is a bad record, alone: the next record begins on the next line. A stray quote costs its own line, and none behind.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from graphft.errors import GraphftError, UsageError

FIELD_CHARS = 131_072
"""The longest quoted field: the csv module's own limit. It stays the same when a script raises that one, as all
processes must divide a file alike."""
RECORD_BYTES = 1 << 20
"""A record over several lines is at most so long: how far a quote without its partner is looked for."""
_TOO_LONG = f"a quote opens a field, and no quote closes it within {FIELD_CHARS:,} characters"

Record = tuple[bytes, list[str] | None, str]
"""(the bytes with their line end, the fields if they are known already, what is wrong or ""). A plain tuple: a file has
millions, and most lines have no quote and are not taken apart when they are described."""


def csv_header(line: bytes, url: str) -> list[str]:
    """Field names in a CSV file's first line."""
    try:
        return next(csv.reader([line.decode("utf-8-sig")], strict=True), [])
    except UnicodeDecodeError as e:
        raise no_utf8(url, 1, e) from None
    except csv.Error as e:
        if b"\r" in line.rstrip(b"\r\n"):
            raise UsageError(
                f"{url}: lines end with \\r alone (carriage return), expected \\n or \\r\\n",
                rule="format",
                help=r"convert the file: tr '\r' '\n' < FILE > NEW",
            ) from None
        raise GraphftError(
            f"{url} has no header line: {e}", rule="format", help="give the fields' names, in one line"
        ) from e


def csv_fields(record: Record) -> list[str]:
    """The fields of a record that is well formed."""
    raw, fields, _ = record
    return fields if fields is not None else raw.decode(errors="replace").rstrip("\r\n").split(",")


class CsvRecords:
    """Records of CSV lines (with their line ends) behind the header of `width` fields. Blank lines are among them.

    What follows a record has no influence on it, so that a range of whole records is divided as the whole file is.
    """

    def __init__(self, lines: Iterable[bytes], width: int) -> None:
        self._source, self._width = iter(lines), width
        self._again = deque[bytes]()
        """Lines that were read in vain, before those of the source."""
        self._line: list[str] = []
        self._reader = csv.reader(iter(self._line.pop, None), strict=True)
        """Parses `_line`. One for all lines: to make a reader costs more than to use it."""

    def __iter__(self) -> Iterator[Record]:
        commas = self._width - 1
        for line in self._source:
            # Most lines, without a call. The last two bytes are a line end (or the last two of a file without one).
            if line.count(b",") == commas and b'"' not in line and line.find(b"\r", 0, -2) < 0:
                yield line, None, ""
            else:
                yield self._record(line)
                while self._again:
                    yield self._record(self._again.popleft())

    def _record(self, line: bytes) -> Record:
        """The record that begins on `line`."""
        if b'"' in line:
            self._line.append(line.decode(errors="replace"))
            try:
                fields = next(self._reader)
            except (csv.Error, IndexError):  # wrong quotes; or no line to go on with
                return self._long_record(line)
            too_long = len(line) > FIELD_CHARS and max(map(len, fields)) > FIELD_CHARS
            return line, fields, _TOO_LONG if too_long else self._miscounted(len(fields))
        if b"\r" in line.rstrip(b"\r\n"):
            return line, None, "it has a carriage return (\\r) in the middle: lines end with \\n or \\r\\n"
        return line, None, self._miscounted(line.count(b",") + 1)

    def _long_record(self, line: bytes) -> Record:
        """The record of several lines that begins on `line`; or this line, a bad record, and the others again."""
        taken: list[bytes] = []
        try:
            fields = next(csv.reader(self._following(line, taken), strict=True))
        except csv.Error as error:
            wrong = _misquoted(str(error), len(taken))
        else:
            if max(map(len, fields)) > FIELD_CHARS:
                wrong = _TOO_LONG
            elif wrong := self._miscounted(len(fields)):  # more likely a stray quote
                wrong = f"a quoted field goes on for {len(taken)} lines, and then {wrong}"
            else:
                return b"".join(taken), fields, ""
        self._again.extendleft(reversed(taken[1:]))
        return line, None, wrong

    def _following(self, line: bytes, taken: list[bytes]) -> Iterator[str]:
        """`line` and those behind it, as long as a record may be; `taken`: those that were asked for."""
        size, following = 0, line
        while following:
            taken.append(following)
            size += len(following)
            yield following.decode(errors="replace")
            if size > RECORD_BYTES:
                return
            following = self._again.popleft() if self._again else next(self._source, b"")

    def _miscounted(self, count: int) -> str:
        return "" if count == self._width else f"it has {count} fields, the header {self._width}"


def _misquoted(error: str, lines: int) -> str:
    """What the csv module refused, in words."""
    if "field larger" in error:
        return _TOO_LONG
    if "unexpected end" in error:
        return "a quote opens a field, and no quote closes it"
    if "expected after" in error:
        where = "" if lines == 1 else f", {lines - 1} lines on"
        return f"text stands behind the quote that closes a field{where}: a quote inside of quotes is doubled"
    return f"its quotes cannot be understood: {error}"


def json_fields(line: bytes) -> dict[str, Any]:
    """The fields of a JSON line. Raises ValueError, UnicodeDecodeError for another encoding."""
    try:
        fields = json.loads(line)
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from None
    except RecursionError:
        raise ValueError("it is no JSON: it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"it is no JSON object, but of type {type(fields).__name__}")
    return fields


_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


def no_utf8(url: str, line: int, error: UnicodeDecodeError) -> GraphftError:
    """The error for a file in another encoding, or a compressed one. `line`: where it shows."""
    kind = next((name for magic, name in _COMPRESSED.items() if line == 1 and error.object.startswith(magic)), None)
    if kind is not None:
        return UsageError(
            f"{url} is compressed ({kind}), expected text",
            rule="encoding",
            help=f'decompress it first; or give storage_options={{"compression": "{kind}"}}: then a chunk costs '
            "decompressing the file",
        )
    around = error.object[max(0, error.start - 20) : error.end + 10]
    wide = error.object.startswith((b"\xff\xfe", b"\xfe\xff"))
    likely = "UTF-16" if wide else "ISO-8859-1" if error.object[error.start] >= 0xA0 else "WINDOWS-1252"
    return UsageError(
        f"{url}, line {line:,}: byte {error.start + 1} (0x{error.object[error.start]:02x}) is no UTF-8, in {around!r}",
        rule="encoding",
        help=f"convert the file: iconv -f {likely} -t UTF-8 (it looks like {likely})",
    )
