"""Describes data in files of any URL that fsspec opens: Parquet, CSV.

CSV is read whole for this, so that all of its bad records are known at once; of Parquet only the footer, a few lists
and the first chunk are read.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import IO, Any

from graphft.data.formats import OPEN_QUOTE, Decoded, csv_header, decode_csv, decode_parquet, is_list, open_parquet
from graphft.data.spec import DIGITS, ChunkInfo, DataSpec, check_chunk_size, check_columns, split, torch_dtype
from graphft.data.urls import Stamp, Urls, expand_urls, open_url
from graphft.errors import GraphftError, UsageError, listed, shown_plainly
from graphft.ir import Type

log = logging.getLogger("graphft")

FORMATS = ("parquet", "csv")
BAD_SHARE = 0.01
"""More bad records than this share are an error, fewer a warning: a job discards what it cannot read."""
_REMEDY = (
    "convert these fields to numbers (one for each category; a missing value is an empty field), drop such records, "
    "give the column another dtype, or leave the field out of columns"
)
_QUOTES = "a record of CSV is a line: correct a stray quote; write texts with line ends as Parquet"
Fields = str | Sequence[str]
Range = tuple[int, ...]
"""A chunk's place in its file: (records, start), and of text (offset, size, line)."""


@shown_plainly
def files(
    urls: Urls,
    format: str,
    columns: Mapping[str, Fields],
    dtypes: Mapping[str, Any] | None = None,
    chunk_size: int = 4096,
    storage_options: Mapping[str, Any] | None = None,
) -> DataSpec:
    """Describes records in files. `urls` are paths or what fsspec understands (`s3://...`, `zip://a.csv::file://...`);
    a pattern (`part-*.csv`) stands for the files that match it now, in the order of their names.

    `columns` maps a column to the field it holds (`"y": "label"`, batch shape [batch]) or to several
    (`"x": ("f1", "f2")`, [batch, 2]). In Parquet files a field may hold lists of one length, which lie beside the other
    fields of their column (`"e": "embedding"`, [batch, 768]). `dtypes` gives a column's dtype (default float32). An
    empty or null field is NaN where the dtype is floating, and an error elsewhere. CSV files have a header line. More
    than 1 % of records that cannot be read are an error here; fewer are a warning.

    A chunk holds at most `chunk_size` records of one file; of Parquet it costs reading the row groups that it is in.
    `storage_options` go to fsspec, and are stored with the job: no secrets in them. Raises GraphftError when a file is
    missing, lacks a field, is empty, of another format or encoding, or holds what is no number.
    """
    check_chunk_size(chunk_size)
    if format not in FORMATS:
        help = f"formats are {', '.join(FORMATS)}; of .npy: graphft.arrays(x=numpy.load(FILE, mmap_mode='r')); of JSON "
        help += "lines: pandas.read_json(FILE, lines=True).to_parquet(NEW)"
        raise GraphftError(f"unknown format {format!r}", rule="format", help=help)
    options, names, dtypes = dict(storage_options or {}), check_columns(columns), dict(dtypes or {})
    if unknown := [name for name in dtypes if name not in names]:
        text = f"dtypes has {', '.join(map(repr, unknown))}, but the columns are {', '.join(names)}"
        raise UsageError(text, rule="columns", help="dtypes are given by column, and not by field")
    dtype_of = {name: torch_dtype(name, dtypes.get(name, "float32")) for name in names}
    fields = {c: [of] if isinstance(of := columns[c], str) else list(of) for c in names}
    wanted = {f: dtype_of[c] for c, fs in fields.items() for f in fs}
    paths, ranges, stamps = expand_urls(urls, options), list[tuple[int, Range]](), dict[str, Stamp]()
    quality, lists = Quality(), dict[str, int]()
    for number, url in enumerate(paths):
        with open_url(url, options) as (f, stamp):
            if format == "parquet":
                found, checksum = _describe_parquet(f, url, wanted, chunk_size, quality, lists), ""
            else:
                found, checksum = _describe_csv(f, url, wanted, chunk_size, quality)
        stamps[url] = replace(stamp, checksum=checksum)
        ranges += [(number, one) for one in found]
    quality.report()
    lists = {name: width for name, width in lists.items() if width}
    types = {}
    for c, fs in fields.items():
        alone = isinstance(columns[c], str) and fs[0] not in lists
        types[c] = Type(dtype_of[c], ("batch",) if alone else ("batch", sum(lists.get(f, 1) for f in fs)))
    if not ranges:
        raise GraphftError(f"no records in {', '.join(stamps)}", rule="short-data", help="give at least one batch")
    chunks = tuple(ChunkInfo(i, count, start, file, *at) for i, (file, (count, start, *at)) in enumerate(ranges))
    source = {
        "format": format,
        "urls": paths,
        "fields": fields,
        "lists": lists,
        "storage_options": options,
        "stamps": {url: astuple(stamp) for url, stamp in stamps.items()},
        "fingerprint": {url: stamp.fingerprint for url, stamp in stamps.items()},
    }
    return DataSpec("files", types, chunks, source)


@dataclass
class Quality:
    """Counts what cannot be read of some files; `examples` are by field."""

    records: int = 0
    bad: int = 0
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, decoded: Decoded, place: Callable[[int], str]) -> None:
        """Takes decoded records in; `place` names one by its position."""
        self.records += decoded.records
        self.bad += len(decoded.bad)
        for i in sorted(decoded.bad):
            for name, text in decoded.bad[i].items():
                if text == OPEN_QUOTE:
                    raise UsageError(f"{place(i)}: {text}", rule="data", help=_QUOTES)
                self.examples.setdefault(name, f"{place(i)}: {text}")

    def report(self) -> None:
        """Warns of what was found. Raises UsageError[data] if too many records are bad."""
        text = f"{self.bad:,} of {self.records:,} records cannot be read: {listed([*self.examples.values()], '; ')}"
        if self.bad > BAD_SHARE * self.records:
            raise UsageError(text, rule="data", help=_REMEDY)
        if self.bad:
            log.warning("%s; they will be discarded", text)


def _need(fields: Iterable[str], there: Sequence[str], url: str) -> None:
    """Raises UsageError[columns] unless each of the fields is there once."""
    if wrong := [f"{'no' if f not in there else 'more than one'} field {f}" for f in fields if there.count(f) != 1]:
        help = f"its fields are {', '.join(there) or 'none: it is empty'} (fields of CSV are separated by commas)"
        raise UsageError(f"{url} has {', '.join(wrong)}", rule="columns", help=help)


def _describe_csv(
    f: IO[bytes], url: str, fields: Mapping[str, str], chunk_size: int, quality: Quality
) -> tuple[list[Range], str]:
    """Returns byte ranges of `chunk_size` lines, and the file's checksum."""
    ranges, name, first = list[Range](), url.rpartition("/")[2], f.readline()
    header, made = csv_header(first, url), hashlib.sha256(first)
    _need(fields, header, url)
    start, offset, line = 0, len(first), 2
    while group := list(itertools.islice(f, chunk_size)):
        data = b"".join(group)
        made.update(data)
        if not data.isspace():
            decoded = decode_csv(group, header, fields)
            numbers = [line + i for i, raw in enumerate(group) if not raw.isspace()]
            quality.add(decoded, lambda i, numbers=numbers: f"line {numbers[i]:,} of {name}")  # type: ignore[misc]
            ranges.append((decoded.records, start, offset, len(data), line))
            start += decoded.records
        offset, line = offset + len(data), line + len(group)
    return ranges, made.hexdigest()[:DIGITS]


def _describe_parquet(
    f: IO[bytes], url: str, fields: Mapping[str, str], chunk_size: int, quality: Quality, lists: dict[str, int]
) -> list[Range]:
    """Returns ranges of rows. `lists` gets the lengths of the fields' lists, 0 for numbers; it has those of the files
    before."""
    import pyarrow.types as kinds

    opened, name = open_parquet(f, url), url.rpartition("/")[2]
    _need(fields, opened.schema_arrow.names, url)
    ranges: list[Range] = [(n, start) for start, n in split(opened.metadata.num_rows, chunk_size)]
    wrong = []
    for one, dtype in fields.items():
        declared = opened.schema_arrow.field(one).type
        kind = declared.value_type if is_list(declared) or kinds.is_dictionary(declared) else declared
        is_number = kinds.is_primitive(kind) and not kinds.is_temporal(kind)
        if not (is_number or kinds.is_decimal(kind) or kinds.is_null(kind)):
            wrong.append(f"field {one} is {declared}, no {dtype}")
            continue
        width = _width(opened, one, url) if is_list(declared) else 0
        if not kinds.is_null(declared) and lists.setdefault(one, width) != width:
            text = f"field {one} has {width} values in each record of {url}, and {lists[one]} before (0: no list)"
            raise UsageError(text, rule="columns", help="write it alike in all files")
    if wrong:
        raise UsageError(f"{name}: {listed(wrong, '; ')}", rule="data", help=_REMEDY)
    for records, start in ranges[: not quality.records]:  # of the first file
        widths = {one: width for one, width in lists.items() if width and one in fields}
        quality.add(decode_parquet(opened, start, records, fields, widths), lambda i: f"record {i} of {name}")
    return ranges


def _width(opened: Any, name: str, url: str) -> int:
    """Returns the length of the first list of the field; a list of another length is a bad record."""
    import pyarrow.compute

    column = opened.read_row_group(0, columns=[name], use_threads=False).column(0)
    lengths = pyarrow.compute.list_value_length(column).drop_null()
    if not len(lengths) or not (width := int(lengths[0].as_py())):
        text = f"{url}: field {name} has no values in the first row group"
        raise UsageError(text, rule="data", help="give all lists of a field one length, of 1 or more")
    return width
