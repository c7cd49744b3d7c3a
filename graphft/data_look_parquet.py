"""A look at Parquet files when they are described: at the footer, and at the first rows of columns of words and lists.

The footer tells each field's type and, mostly, its number of nulls, of the whole file; and how many values lists have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphft.data_look import BAD_SHARE, FIRST
from graphft.data_numbers import fits
from graphft.errors import UsageError

log = logging.getLogger("graphft")


def look_at_parquet(opened: Any, url: str, dtypes: Mapping[str, str]) -> dict[str, int]:
    """Returns how many values each field has in a record: the length of its lists, 0 if it is a number; nothing for a
    field that is null everywhere. Warns of nulls.

    Raises GraphftError[data] for a field of no numbers, with lists of several lengths, or null where its dtype has no
    NaN. `opened`: a pyarrow.parquet.ParquetFile. `dtypes`: of the fields that are wanted.
    """
    widths: dict[str, int] = {}
    for field, dtype in dtypes.items():
        _check_type(opened, url, field, dtype)
        groups = _groups(opened, field)
        if (width := _width(opened, url, field, groups)) is not None:
            widths[field] = width
        if not (nulls := sum(group.nulls for group in groups)):
            continue
        values = sum(group.values for group in groups)
        what = f"{url}: field {field} is null in {nulls:,} of {values:,} {'values' if width else 'records'}"
        if np.dtype(dtype).kind == "f":
            log.warning("%s, and is read as NaN: fill it, drop these records, or have the model handle NaN", what)
        elif nulls > BAD_SHARE * values:
            raise UsageError(
                f"{what}, expected {dtype}",
                rule="data",
                help=f"{dtype} has no NaN: fill the field, drop these records, or give the column a floating dtype",
            )
        else:
            log.warning("%s, expected %s: reading them will fail; fill the field, or drop them", what, dtype)
    return widths


def least_size(metadata: Any) -> int:
    """The bytes that a file with this footer has at least."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    starts = [min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in columns]
    ends = [start + column.total_compressed_size for start, column in zip(starts, columns, strict=True)]
    return int(max(ends, default=0) + metadata.serialized_size + 8)


def _is_list(found: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_list(found) or kinds.is_large_list(found) or kinds.is_fixed_size_list(found))


class _Group(NamedTuple):
    """Returns what the footer tells of a field in a row group. A null list is one value."""

    rows: int
    values: int
    nulls: int


def _groups(opened: Any, field: str) -> list[_Group]:
    import pyarrow.types as kinds

    found, names = opened.schema_arrow.field(field).type, opened.schema_arrow.names
    paths = [opened.schema.column(i).path for i in range(len(opened.schema))]
    inside = [path for path in paths if path.startswith(f"{field}.") and path not in names]
    index = paths.index(inside[0] if _is_list(found) else field)
    groups = []
    for group in map(opened.metadata.row_group, range(opened.metadata.num_row_groups)):
        column = group.column(index)
        statistics = column.statistics
        nulls = statistics.null_count if statistics is not None and statistics.has_null_count else 0
        groups.append(_Group(group.num_rows, column.num_values, column.num_values if kinds.is_null(found) else nulls))
    return groups


def _width(opened: Any, url: str, field: str, groups: Sequence[_Group]) -> int | None:
    """The length of the field's lists; 0 of no lists, None if all are null."""
    import pyarrow.compute
    import pyarrow.types as kinds

    found = opened.schema_arrow.field(field).type
    if not _is_list(found):
        return None if kinds.is_null(found) else 0
    width, row = None, 0
    for number, group in enumerate(groups):
        if width is None or group.values != group.rows * width:  # else very likely all have this length
            lists = opened.read_row_group(number, columns=[field], use_threads=False).column(0)
            for i, length in enumerate(pyarrow.compute.list_value_length(lists).to_pylist()):
                width = length if width is None else width
                if length not in (None, width) or length == 0:
                    raise UsageError(
                        f"{url}: field {field} has {length} values in record {row + i:,}, and {width} in those before",
                        rule="data",
                        help="give all lists of a field one length, of 1 or more: pad them; or leave it out of columns",
                    )
        row += group.rows
    return width


def _check_type(opened: Any, url: str, field: str, dtype: str) -> None:
    import pyarrow.types as kinds

    declared = opened.schema_arrow.field(field).type
    found = declared.value_type if _is_list(declared) else declared
    if any(
        is_kind(found)
        for is_kind in (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal, kinds.is_null)
    ):
        return
    value: Any = None
    if kinds.is_string(found) or kinds.is_large_string(found) or kinds.is_dictionary(found):
        rows = next(opened.iter_batches(batch_size=FIRST, columns=[field]), None)
        values = rows.column(0).to_pylist() if rows is not None else []
        wrong = next((i for i, v in enumerate(values) if v is not None and not fits(v, dtype)), None)
        if wrong is None:  # numbers, written as words
            return
        value = f"; record {wrong} has {values[wrong]!r}"
    raise UsageError(
        f"{url}: field {field} is {declared}, expected numbers for {dtype}{value or ''}",
        rule="data",
        help="convert the field to numbers (one number for each category; of a time, seconds), or leave it out of "
        "columns",
    )
