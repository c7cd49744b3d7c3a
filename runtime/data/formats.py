"""Decoding one chunk of files: Parquet rows, byte ranges of CSV and JSON lines, rows of NumPy arrays."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from graphft.data import ChunkInfo, DataSpec
from graphft.data_files import npy_header, open_url, urls_of
from graphft.data_numbers import fits, numbers
from graphft.data_records import CsvRecords, csv_fields, csv_header, json_fields
from graphft.errors import UsageError
from graphft.runtime.data.changes import CHANGED, DescribedFiles, check_unchanged


class Decoded(NamedTuple):
    """A chunk: its columns; by position, what is wrong with records that cannot be read, whose rows mean nothing: with
    where they are, `line 3,336 of f.csv: field x is 'red', no float32`."""

    columns: dict[str, np.ndarray]
    bad: dict[int, str]


def _good_numbers(values: Sequence[Any], width: int, dtype: str, field: str, bad: dict[int, str]) -> np.ndarray:
    """The field's values as `dtype`, `width` of each record, 0 where it is bad; adds those to `bad` whose value is no
    such number."""
    if not bad:
        try:
            return numbers(values, dtype, field)
        except UsageError:
            pass  # one by one: which records are to blame?
    good: list[Any] = []
    for i, value in enumerate(values):
        missing, record = value is None or value != value, i // width
        if record not in bad and not (missing and np.dtype(dtype).kind == "f") and not fits(value, dtype):
            bad[record] = f"field {field} is {'empty' if missing else repr(value)}, no {dtype}"
        good.append(0 if record in bad else value)
    return numbers(good, dtype, field)


def _flat(lists: Any, width: int, field: str, bad: dict[int, str]) -> Sequence[Any]:
    """The values of a Parquet column of lists. A null list is one of nulls; one of another length is `bad`."""
    whole = lists.combine_chunks()
    if not lists.null_count and whole.value_lengths().unique().to_pylist() == [width]:
        return _exact(whole.flatten())
    rows = [[None] * width if row is None else row for row in whole.to_pylist()]
    bad |= {i: f"field {field} has {len(r)} values, expected {width}" for i, r in enumerate(rows) if len(r) != width}
    return [value for row in rows for value in (row if len(row) == width else [0] * width)]


def _lines_before(records: Iterable[bytes]) -> list[int]:
    """How many lines are before each record that is not blank."""
    before, found = 0, []
    for raw in records:
        if not raw.isspace():
            found.append(before)
        before += raw.count(b"\n")
    return found


def _exact(column: Any) -> Sequence[Any]:
    """The values of a column of a Parquet table: NumPy has integers with nulls as floats, which rounds large ones."""
    import pyarrow.types as kinds

    if column.null_count and not kinds.is_floating(column.type):
        return list(column.to_pylist())
    array: np.ndarray = column.to_numpy(zero_copy_only=False)
    return array  # type: ignore[return-value]


class ChunkFiles:
    """The files of a description. Raises GraphftError when one is missing, or was changed since it was described."""

    def __init__(self, spec: DataSpec) -> None:
        self._spec, self._source = spec, spec.source
        self._options: dict[str, Any] = spec.source["storage_options"]
        self._lists: dict[str, int] = spec.source.get("lists", {})
        self._headers: dict[str, list[str]] = {}
        self._described = DescribedFiles(spec.source.get("stamps", {}))
        for url in urls_of(spec):
            with self._open(url):
                pass

    @contextlib.contextmanager
    def _open(self, url: str) -> Iterator[IO[bytes]]:
        """The file, if it is the one that was described."""
        with open_url(url, self._options) as (f, stamp):
            self._described.check(url, f, stamp)
            yield f
            check_unchanged(url, f, stamp, compressed=bool(self._options.get("compression")))

    def url(self, info: ChunkInfo) -> str:
        urls = self._source["urls"]
        return ", ".join(u[info.file] for u in urls.values()) if isinstance(urls, dict) else str(urls[info.file])

    def read(self, info: ChunkInfo) -> Decoded:
        """The chunk's records; every array has `info.records` rows."""
        bad: dict[int, str] = {}
        if self._source["format"] == "npy":
            columns = {c: self._rows(c, urls[info.file], info) for c, urls in self._source["urls"].items()}
        else:
            columns = self._fields(info, bad)
        for name, array in columns.items():
            if len(array) != info.records:
                raise UsageError(
                    f"column {name} has {len(array)} records, {info.records} when described",
                    rule="data",
                    help="the file was changed: describe the data and the job again",
                )
        names = self.names(info, bad) if bad else {}
        return Decoded(columns, {i: f"{names[i]}: {what}" for i, what in bad.items()})

    def names(self, info: ChunkInfo, positions: Iterable[int]) -> dict[int, str]:
        """What a person finds these records of the chunk by, by position: their lines, where the format has lines; of
        a job that was saved long ago they are not known."""
        name = self.url(info).rpartition("/")[2]
        first = self._source.get("lines")
        if not first:
            return {i: f"record {info.start + i} of {name}" for i in positions}
        url = self._source["urls"][info.file]
        csv = self._source["format"] == "csv"
        with self._open(url) as f:
            width = len(self._header(f, url)) if csv else 0
            f.seek(info.offset)
            data = io.BytesIO(f.read(info.size))
        begin = _lines_before((raw for raw, *_ in CsvRecords(data, width)) if csv else data)
        return {i: f"line {first[info.id] + begin[i]:,} of {name}" for i in positions}

    def _fields(self, info: ChunkInfo, bad: dict[int, str]) -> dict[str, np.ndarray]:
        fields: dict[str, list[str]] = self._source["fields"]
        wanted = {f: self._spec.types[c].dtype for c, fs in fields.items() for f in fs}
        url = self._source["urls"][info.file]
        with self._open(url) as f:
            table = {"parquet": self._parquet, "csv": self._csv, "jsonl": self._jsonl}[self._source["format"]](
                f, url, info, list(wanted), bad
            )
        result = {}
        for column, names in fields.items():
            dtype, shape = self._spec.types[column].dtype, self._spec.record_shape(column)
            widths = {n: self._lists.get(n, 1) for n in names}
            parts = [_good_numbers(table[n], widths[n], dtype, n, bad).reshape(-1, widths[n]) for n in names]
            result[column] = np.concatenate(parts, axis=1).reshape(-1, *shape)
        return result

    def _parquet(
        self, f: IO[bytes], url: str, info: ChunkInfo, names: list[str], bad: dict[int, str]
    ) -> dict[str, Sequence[Any]]:
        import pyarrow.parquet

        opened = pyarrow.parquet.ParquetFile(f, page_checksum_verification=True)
        groups: list[int] = []
        first = start = 0
        for i in range(opened.metadata.num_row_groups):
            end = start + opened.metadata.row_group(i).num_rows
            if start < info.start + info.records and end > info.start:
                first = first if groups else start
                groups.append(i)
            start = end
        table = opened.read_row_groups(groups, columns=names, use_threads=False).slice(info.start - first, info.records)
        columns = {n: table.column(n) for n in names}
        return {n: _flat(c, self._lists[n], n, bad) if n in self._lists else _exact(c) for n, c in columns.items()}

    def _csv(
        self, f: IO[bytes], url: str, info: ChunkInfo, names: list[str], bad: dict[int, str]
    ) -> dict[str, Sequence[Any]]:
        header = self._header(f, url)
        places = [header.index(n) for n in names]
        f.seek(info.offset)
        rows: list[list[str]] = []
        for record in CsvRecords(io.BytesIO(f.read(info.size)), len(header)):
            if not record[0].isspace():
                if record[2]:
                    bad[len(rows)] = record[2]
                rows.append([""] * len(header) if record[2] else csv_fields(record))
        return {n: [row[p] or None for row in rows] for n, p in zip(names, places, strict=True)}

    def _header(self, f: IO[bytes], url: str) -> list[str]:
        if url not in self._headers:
            self._headers[url] = csv_header(f.readline(), url)
        return self._headers[url]

    def _jsonl(
        self, f: IO[bytes], url: str, info: ChunkInfo, names: list[str], bad: dict[int, str]
    ) -> dict[str, Sequence[Any]]:
        f.seek(info.offset)
        rows: list[dict[str, Any]] = []
        for i, line in enumerate(line for line in io.BytesIO(f.read(info.size)) if not line.isspace()):
            try:
                rows.append(json_fields(line))
            except ValueError as error:
                rows.append({})
                bad[i] = str(error)
        return {n: [row.get(n) for row in rows] for n in names}

    def _rows(self, column: str, url: str, info: ChunkInfo) -> np.ndarray:
        with self._open(url) as f:
            shape, fortran, dtype = npy_header(f, url)
            wanted = (self._source["rows"][info.file], *self._spec.record_shape(column))
            if (shape, dtype.name) != (wanted, self._spec.types[column].dtype) or (fortran and len(shape) > 1):
                raise UsageError(
                    f"{url} was changed: it holds {dtype.name}{list(shape)}{' in Fortran order' if fortran else ''}, "
                    f"{self._spec.types[column].dtype}{list(wanted)} when the job was described",
                    rule=CHANGED,
                    help="put the file back as it was, or describe the data and the job again",
                )
            row = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
            f.seek(info.start * row, os.SEEK_CUR)
            array = np.frombuffer(f.read(info.records * row), dtype).reshape(-1, *shape[1:])
        return array.astype(dtype.newbyteorder("="))
