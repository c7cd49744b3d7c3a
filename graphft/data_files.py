"""Data in files of any URL that fsspec opens: Parquet, CSV, JSON lines, NumPy.

The files are looked at once, when they are described, to divide them into chunks that can be read without the rest
of their file: ranges of Parquet row groups, byte ranges of CSV and JSON lines, row ranges of NumPy arrays.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

import numpy as np

from graphft.data import ChunkInfo, DataSpec, check_chunk_size, check_columns, split, torch_dtype
from graphft.data_look import FIRST, CsvLook, JsonLook, Look
from graphft.data_look_parquet import least_size, look_at_parquet
from graphft.data_numbers import warn_of_nonfinite
from graphft.data_records import CsvRecords, Record, csv_header, json_fields, no_utf8
from graphft.data_stamps import HashedFile, Stamp, footer_of, settle, stamp_of
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Type

LOOK_BYTES = 4 << 20
"""Of a .npy file, at most so much is looked at when it is described."""
FORMATS = ("parquet", "csv", "jsonl", "npy")
Fields = str | Sequence[str]
Urls = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def files(
    urls: Urls | Mapping[str, Urls],
    format: str,
    columns: Mapping[str, Fields] | None = None,
    dtypes: Mapping[str, str] | None = None,
    chunk_size: int = 4096,
    storage_options: Mapping[str, Any] | None = None,
) -> DataSpec:
    """Describes records in files. `urls` are paths or what fsspec understands (`s3://...`, `zip://a.csv::file://...`);
    a pattern (`part-*.csv`) stands for the files that match it now, in the order of their names.

    parquet, csv, jsonl: `columns` maps a column to the field it holds (`"y": "label"`, batch shape [batch]) or to
    several (`"x": ("f1", "f2")`, [batch, 2]). In Parquet files a field may hold lists of one length, which lie beside
    the other fields of their column (`"e": "embedding"`, [batch, 768]). `dtypes` gives a column's dtype (default
    float32). An empty or null field is NaN where the dtype is floating, and an error elsewhere. CSV files have a header
    line and are UTF-8. Some records are looked at (docs/data.md says which): more than 1 % that cannot be read are an
    error here; fewer are a warning, and so are empty fields.
    npy: `urls` maps each column to its files; the i-th files of all columns have the same number of rows; `columns`
    and `dtypes` are not given: a column has the shape and dtype of its files.

    A chunk holds at most `chunk_size` records; small Parquet row groups are joined, large ones divided (each part
    then costs reading the group: better choose row groups of about that size). `storage_options` go to fsspec, and
    are stored with the job: no secrets in them. Raises GraphftError when a file is missing, lacks a field, is empty, of
    another format or encoding, or holds what is no number.
    """
    check_chunk_size(chunk_size)
    if format not in FORMATS:
        raise GraphftError(f"unknown format {format!r}", rule="format", help=f"formats are {', '.join(FORMATS)}")
    options = dict(storage_options or {})
    if format == "npy":
        return _describe_npy(urls, columns, dtypes, chunk_size, options)
    if isinstance(urls, Mapping) or not columns:
        raise GraphftError(
            f"format {format} needs a list of urls, and columns",
            rule="columns",
            help='for example files(["a.csv"], "csv", columns={"x": ("f1", "f2"), "y": "label"})',
        )
    names = check_columns(columns)
    _check_dtypes(dtypes or {}, names)
    fields = {c: _names(columns[c]) for c in names}
    dtype_of = {c: _dtype(c, (dtypes or {}).get(c, "float32")) for c in names}
    wanted = {f: dtype_of[c] for c, fs in fields.items() for f in fs}
    paths, ranges, lines, stamps = _listed(urls, options), [], list[int](), dict[str, Stamp]()
    widths: dict[str, dict[int, str]] = {}
    for number, url in enumerate(paths):
        with open_url(url, options) as (f, stamp):
            settle(f)
            found, begin, stamps[url], wide = _DESCRIBE[format](f, stamp, url, wanted, chunk_size)
            for field, width in wide.items():
                widths.setdefault(field, {}).setdefault(width, url)
            ranges += [(records, start, number, *place) for records, start, *place in found]
            lines += begin
    chunks = tuple(ChunkInfo(i, *r) for i, r in enumerate(ranges))
    if not chunks:
        raise GraphftError(f"no records in {', '.join(paths)}", rule="short-data", help="give at least one batch")
    lists = {field: _one_width(field, found) for field, found in widths.items() if any(found)}
    shapes = {
        c: () if isinstance(columns[c], str) and fs[0] not in lists else (sum(lists.get(f, 1) for f in fs),)
        for c, fs in fields.items()
    }
    types = {c: Type(dtype_of[c], ("batch", *shapes[c])) for c in names}
    return DataSpec(
        "files",
        types,
        chunks,
        {
            "format": format,
            "urls": paths,
            "sizes": [stamps[url].size for url in paths],
            "fields": fields,
            "storage_options": options,
            **({"lines": lines} if lines else {}),
            **({"lists": lists} if lists else {}),
            **_as_found(stamps),
        },
    )


def _as_found(stamps: Mapping[str, Stamp]) -> dict[str, Any]:
    return {
        "stamps": {url: stamp.to_json() for url, stamp in stamps.items()},
        "fingerprint": {url: stamp.fingerprint for url, stamp in stamps.items()},
    }


def urls_of(spec: DataSpec) -> list[str]:
    """The files of a description, each once."""
    urls = spec.source["urls"]
    return list(dict.fromkeys(u for us in urls.values() for u in us) if isinstance(urls, dict) else urls)


@contextlib.contextmanager
def open_url(url: str, options: Mapping[str, Any]) -> Iterator[tuple[IO[bytes], Stamp]]:
    """The file at `url`, for reading bytes, and what it is now. Raises GraphftError when it cannot be opened."""
    import fsspec

    opened: Any = None
    with contextlib.ExitStack() as stack:
        try:
            opened = fsspec.open(url, "rb", **options)  # kept: a zip file closes when its file system goes
            f: IO[bytes] = stack.enter_context(opened)
            stamp = stamp_of(opened, f)
        except ImportError as e:
            raise GraphftError(
                f"{url} needs a package that is not installed", rule="missing-package", help=str(e)
            ) from e
        except (OSError, EOFError, zlib.error, KeyError, ValueError) as e:
            folder = opened and isinstance(e, (IsADirectoryError, FileNotFoundError)) and opened.fs.isdir(opened.path)
            raise UsageError(
                f"{url} is a folder, expected a file" if folder else f"cannot open {url}: {describe(e)}",
                rule="missing-file",
                help="give its files, by a pattern: FOLDER/*"
                if folder
                else "is the URL right, may this machine read it?",
            ) from e.with_traceback(None)  # the frames of a library would stand before what is to be read
        yield f, stamp


def _listed(urls: Urls, options: Mapping[str, Any]) -> list[str]:
    """URLs; plain paths become absolute, as the roles may run in other folders, with `~` as the user's home. Patterns
    become the files that they match now, by name."""
    given = [os.fspath(u) for u in ([urls] if isinstance(urls, (str, os.PathLike)) else urls)]
    if not given:
        raise UsageError("no files are given", rule="missing-file", help="give at least one URL")
    found = [u if "://" in u else os.path.abspath(os.path.expanduser(u)) for u in given]
    return [one for url in found for one in (_matching(url, options) if _is_pattern(url) else [url])]


def _is_pattern(url: str) -> bool:
    return any(c in url for c in "*?[") and "::" not in url and not os.path.exists(url)


def _matching(pattern: str, options: Mapping[str, Any]) -> list[str]:
    """The files that match, in the order of their names. Raises UsageError if none does."""
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(pattern, **options)
        found = sorted(one for one, info in fs.glob(path, detail=True).items() if info["type"] == "file")
    except (ImportError, OSError, ValueError) as e:
        raise UsageError(
            f"cannot look for {pattern}: {describe(e)}", rule="missing-file", help="check the URL, or list the files"
        ) from e
    if not found:
        raise UsageError(
            f"no file matches {pattern}",
            rule="missing-file",
            help="* stands for any part of a name, ** for folders, too",
        )
    return [fs.unstrip_protocol(one) if "://" in pattern else one for one in found]


def _check_dtypes(dtypes: Mapping[str, str], columns: Sequence[str]) -> None:
    unknown = [name for name in dtypes if name not in columns]
    if unknown:
        raise UsageError(
            f"dtypes has {', '.join(map(repr, unknown))}, but the columns are {', '.join(columns)}",
            rule="columns",
            help="dtypes are given by column, and not by field: name the columns as in columns={...}",
        )


def _names(fields: Fields) -> list[str]:
    return [fields] if isinstance(fields, str) else list(fields)


def _dtype(column: str, dtype: str) -> str:
    try:
        return torch_dtype(column, np.dtype(dtype))
    except TypeError:
        raise GraphftError(
            f"column {column}: unknown dtype {dtype!r}",
            rule="columns",
            help="give a NumPy dtype such as float32 or int64",
        ) from None


def _one_width(field: str, found: Mapping[int, str]) -> int:
    """`found`: a file for each length that the field's lists have, 0 where it is a number."""
    if len(found) > 1:
        told = [f"{f'lists of {width} values' if width else 'numbers'} in {url}" for width, url in found.items()]
        raise UsageError(f"field {field} has {' and '.join(told)}", rule="columns", help="write it alike in all files")
    return next(iter(found))


def _need(fields: Sequence[str], there: Sequence[str], url: str) -> None:
    missing = [f for f in fields if f not in there]
    if missing:
        separator = next((s for s in ";\t|" if len(there) == 1 and s in there[0]), "")
        raise GraphftError(
            f"{url} has no field {', '.join(missing)}" + ": it is empty" * (not there),
            rule="columns",
            help=f"its fields are {', '.join(map(str, there)) or 'none'}"
            + f"; fields are separated by commas, here by {separator!r}: write the file with commas" * bool(separator),
        )
    twice = [f for f in fields if list(there).count(f) > 1]
    if twice:
        raise UsageError(
            f"{url} has more than one field {', '.join(twice)}",
            rule="columns",
            help=f"its fields are {', '.join(map(str, there))}: each needs a name of its own",
        )


Range = tuple[int, int, int, int]
"""(records, start, offset, size) of a chunk, in its file."""
Found = tuple[list[Range], list[int], Stamp, dict[str, int]]
"""Chunks of a file; of text files, the line in which each begins, from 1; what the file is; of a Parquet file, how many
values each field has in a record: its lists' length, 0 if it is a number."""


def _describe_parquet(f: IO[bytes], stamp: Stamp, url: str, fields: Mapping[str, str], chunk_size: int) -> Found:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise GraphftError("reading Parquet needs pyarrow", rule="format", help="pip install 'graphft[files]'") from e
    try:
        opened = pyarrow.parquet.ParquetFile(f, page_checksum_verification=True)
    except pyarrow.ArrowInvalid as e:
        raise GraphftError(f"{url} is no Parquet file: {e}", rule="format", help="check the format") from e
    _need(list(fields), opened.schema_arrow.names, url)
    if stamp.size < (least := least_size(opened.metadata)):
        raise _wrong_size(url, stamp, least, f"its footer tells of {least:,} at least")
    widths = look_at_parquet(opened, url, fields)
    return list(_row_groups(opened.metadata, chunk_size)), [], replace(stamp, footer=footer_of(f)), widths


def _wrong_size(url: str, stamp: Stamp, expected: int, told: str) -> UsageError:
    what = "it was cut off" if stamp.size < expected else "something lies behind its array"
    help = "copy it again, or write it again, one array a file"
    return UsageError(f"{url} has {stamp.size:,} bytes, {told}: {what}", rule="format", help=help)


def _row_groups(metadata: Any, chunk_size: int) -> Iterator[Range]:
    """Chunks of whole row groups, and parts of large ones."""
    start = length = 0
    for i in range(metadata.num_row_groups):
        rows = metadata.row_group(i).num_rows
        if length and length + rows > chunk_size:
            yield length, start, 0, 0
            start, length = start + length, 0
        if rows > chunk_size:
            yield from ((n, start + a, 0, 0) for a, n in split(rows, chunk_size))
            start += rows
        else:
            length += rows
    if length:
        yield length, start, 0, 0


def _describe_csv(f: IO[bytes], stamp: Stamp, url: str, fields: Mapping[str, str], chunk_size: int) -> Found:
    hashed = HashedFile(f)
    header = hashed.readline()
    names = csv_header(header, url)
    _need(list(fields), names, url)
    look = CsvLook(url, fields, names, line=2)
    ranges, lines = _text_ranges(CsvRecords(hashed, len(names)), len(header), chunk_size, look)
    return ranges, lines, replace(stamp, checksum=hashed.checksum), {}


def _describe_jsonl(f: IO[bytes], stamp: Stamp, url: str, fields: Mapping[str, str], chunk_size: int) -> Found:
    hashed = HashedFile(f)
    first = hashed.readline()
    try:
        if first.strip():
            _need(list(fields), list(json_fields(first)), url)
    except UnicodeDecodeError as e:
        raise no_utf8(url, 1, e) from None
    except ValueError as e:
        raise GraphftError(f"{url}, line 1: {e}", rule="format", help="one JSON object per line") from e
    hashed.rewind()
    records = ((line, None, "") for line in hashed)
    ranges, lines = _text_ranges(records, 0, chunk_size, JsonLook(url, fields))
    return ranges, lines, replace(stamp, checksum=hashed.checksum), {}


def _text_ranges(records: Iterable[Record], offset: int, chunk_size: int, look: Look) -> tuple[list[Range], list[int]]:
    """Byte ranges of up to `chunk_size` records that are not blank, from byte `offset` on, and the line of each one's
    first byte; `look` sees each record."""
    ranges: list[Range] = []
    lines = [look.line]
    start = length = size = 0
    for record in records:
        if length == chunk_size:
            ranges.append((length, start, offset, size))
            lines.append(look.line)
            start, offset, length, size = start + length, offset + size, 0, 0
        look.at(record, edge=length in (0, chunk_size - 1))
        raw = record[0]
        length += not raw.isspace()
        size += len(raw)
    look.end()
    if length:
        ranges.append((length, start, offset, size))
    return ranges, lines[: len(ranges)]


_DESCRIBE = {"parquet": _describe_parquet, "csv": _describe_csv, "jsonl": _describe_jsonl}


def _describe_npy(urls: Any, columns: Any, dtypes: Any, chunk_size: int, options: dict[str, Any]) -> DataSpec:
    if not isinstance(urls, Mapping) or columns or dtypes:
        raise GraphftError(
            "format npy takes its columns from urls",
            rule="columns",
            help='for example files({"x": ["x0.npy"], "y": ["y0.npy"]}, "npy")',
        )
    names = check_columns(urls)
    paths = {c: _listed(urls[c], options) for c in names}
    found = {u: _npy_shape(u, options) for c in names for u in paths[c]}
    shapes = {c: [found[u][0] for u in paths[c]] for c in names}
    for c in names:
        if len({(dtype, shape[1:]) for shape, dtype in shapes[c]}) > 1:
            raise GraphftError(
                f"the files of column {c} differ in dtype or record shape: {shapes[c]}",
                rule="columns",
                help="write them alike",
            )
    rows = {c: [shape[0] for shape, _ in shapes[c]] for c in names}
    if len({tuple(r) for r in rows.values()}) > 1:
        raise GraphftError(
            f"the columns' files have different numbers of rows: {rows}",
            rule="column-lengths",
            help="give every column as many files, the i-th ones with as many rows",
        )
    counts = rows[names[0]]
    ranges = [(n, start, i) for i, count in enumerate(counts) for start, n in split(count, chunk_size)]
    if not ranges:
        raise GraphftError("the files have no rows", rule="short-data", help="give at least one batch")
    types = {
        c: Type(torch_dtype(f"{c} ({paths[c][0]})", dtype), ("batch", *shape[1:]))
        for c, ((shape, dtype), *_) in shapes.items()
    }
    chunks = tuple(ChunkInfo(i, *r) for i, r in enumerate(ranges))
    return DataSpec(
        "files",
        types,
        chunks,
        {
            "format": "npy",
            "urls": paths,
            "rows": counts,
            "storage_options": options,
            **_as_found({url: stamp for url, (_, stamp) in found.items()}),
        },
    )


def _npy_shape(url: str, options: Mapping[str, Any]) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], Stamp]:
    """((shape, dtype), stamp) of a .npy file whose rows lie one behind the other."""
    with open_url(url, options) as (f, stamp):
        settle(f)
        shape, fortran, dtype = npy_header(f, url)
        if shape and not dtype.hasobject:
            if stamp.size != (expected := f.tell() + dtype.itemsize * math.prod(shape)):
                raise _wrong_size(url, stamp, expected, f"its header, {dtype}{list(shape)}, tells of {expected:,}")
            _look_at_first_rows(f, url, shape, dtype)
    if not shape:
        raise GraphftError(f"{url} holds a single value", rule="format", help="give one row per record")
    if fortran and len(shape) > 1:
        raise GraphftError(
            f"{url} is in Fortran order, so its rows are scattered",
            rule="format",
            help="write numpy.ascontiguousarray of it",
        )
    return (shape, dtype), stamp


def _look_at_first_rows(f: IO[bytes], url: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    size = dtype.itemsize * math.prod(shape[1:])
    if 0 < size <= LOOK_BYTES:
        count = min(shape[0], FIRST, LOOK_BYTES // size)
        rows = np.frombuffer(f.read(count * size), dtype).reshape(count, *shape[1:])
        warn_of_nonfinite(url, rows, f" (the first {count} of {shape[0]:,} were looked at)")


def npy_header(f: IO[bytes], url: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype) of a .npy file; leaves `f` where its data begins."""
    try:
        version = np.lib.format.read_magic(f)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(f)
        return np.lib.format.read_array_header_2_0(f)
    except ValueError as e:
        raise GraphftError(f"{url} is no .npy file: {e}", rule="format", help="write it with numpy.save") from e
