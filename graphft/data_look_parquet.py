"""A look at Parquet files when they are described: at the footer, and at the first rows of columns of words.

The footer tells each field's type and, mostly, its number of nulls, of the whole file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphft.data_look import BAD_SHARE, FIRST
from graphft.data_numbers import fits
from graphft.errors import UsageError

log = logging.getLogger("graphft")


def look_at_parquet(opened: Any, url: str, dtypes: Mapping[str, str]) -> None:
    """Raises GraphftError[data] for a field of no numbers, or null where its dtype has no NaN; warns of other nulls.

    `opened`: a pyarrow.parquet.ParquetFile. `dtypes`: of the fields that are wanted.
    """
    for field, dtype in dtypes.items():
        _check_type(opened, url, field, dtype)
        nulls, rows = _nulls(opened, field)
        if not nulls:
            continue
        what = f"{url}: field {field} is null in {nulls:,} of {rows:,} records"
        if np.dtype(dtype).kind == "f":
            log.warning("%s, and is read as NaN: fill it, drop these records, or have the model handle NaN", what)
        elif nulls > BAD_SHARE * rows:
            raise UsageError(
                f"{what}, expected {dtype}",
                rule="data",
                help=f"{dtype} has no NaN: fill the field, drop these records, or give the column a floating dtype",
            )
        else:
            log.warning("%s, expected %s: reading them will fail; fill the field, or drop them", what, dtype)


def _check_type(opened: Any, url: str, field: str, dtype: str) -> None:
    import pyarrow.types as kinds

    found = opened.schema_arrow.field(field).type
    if any(is_kind(found) for is_kind in (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_decimal)):
        return
    value: Any = None
    if kinds.is_string(found) or kinds.is_large_string(found) or kinds.is_dictionary(found):
        rows = next(opened.iter_batches(batch_size=FIRST, columns=[field]), None)
        values = rows.column(0).to_pylist() if rows is not None else []
        wrong = next((i for i, v in enumerate(values) if v is not None and not fits(v, dtype)), None)
        if wrong is None:  # numbers, written as words
            return
        value = f"; record {wrong} has {values[wrong]!r}"
    elif kinds.is_null(found) and np.dtype(dtype).kind == "f":
        return
    raise UsageError(
        f"{url}: field {field} is {found}, expected numbers for {dtype}{value or ''}",
        rule="data",
        help="convert the field to numbers (one number for each category; of a time, seconds), or leave it out of "
        "columns",
    )


def _nulls(opened: Any, field: str) -> tuple[int, int]:
    """(nulls that the footer tells of, rows) of the whole file."""
    metadata, nulls = opened.metadata, 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            column = row_group.column(index)
            if column.path_in_schema == field and column.statistics is not None and column.statistics.has_null_count:
                nulls += column.statistics.null_count
    return nulls, metadata.num_rows
