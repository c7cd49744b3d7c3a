"""Fields of files as numbers: what reading a chunk makes of them, and what is looked at when files are described."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from graphft.errors import GraphftError, UsageError

log = logging.getLogger("graphft")
ROWS_AT_ONCE = 1 << 16


def numbers(values: Iterable[Any], dtype: str, field: str) -> np.ndarray:
    """The field's values as `dtype`, none changed by it; missing ones are NaN where the dtype is floating."""
    target = np.dtype(dtype)
    floating = target.kind == "f"
    if not (isinstance(values, np.ndarray) and values.dtype.kind in "iufb"):
        values = [None if v is None or v != v else v for v in values]
        if None in values and not floating:
            raise UsageError(
                f"field {field} is empty in record {values.index(None)} of the chunk",
                rule="data",
                help=f"{dtype} has no NaN: give the column a floating dtype, or fill the field",
            )
        values = np.array([np.nan if v is None else v for v in values])
    try:
        numbers = values.astype("float64" if floating else "int64") if values.dtype.kind in "SU" else values
        with np.errstate(invalid="ignore"):
            result = numbers.astype(target)
    except (TypeError, ValueError) as e:
        raise UsageError(
            f"field {field} is not a number everywhere: {e}", rule="data", help="encode it as numbers first"
        ) from e
    if not floating and not np.array_equal(result, numbers):
        raise UsageError(
            f"field {field} has values that are no {dtype}",
            rule="data",
            help="give the column a larger or floating dtype, or fill what is missing",
        )
    return result


def fits(value: Any, dtype: str) -> bool:
    """Whether a field's value can be read as `dtype`."""
    if isinstance(value, str) and np.dtype(dtype).kind == "f":  # the usual case, without NumPy's overhead
        try:
            float(value)
        except ValueError:
            return False
        return True
    try:
        return numbers([value], dtype, "").shape == (1,)
    except (GraphftError, ValueError, OverflowError):
        return False


def warn_of_nonfinite(what: str, rows: np.ndarray, more: str = "") -> None:
    """Tells how many rows of an array hold NaN or an infinite value, and the first; nothing if none does.

    `what`: the array, in words; `more`: what else is to be known.
    """
    if rows.dtype.kind not in "fc":
        return
    count, first = 0, 0
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        bad = ~np.isfinite(part).reshape(len(part), -1).all(axis=1)
        if bad.any():
            first = first if count else start + int(bad.argmax())
            count += int(bad.sum())
    if count:
        log.warning(
            "%s: %s of %s records hold a value that is not finite, first record %s: fill it, drop these records, or "
            "have the model handle it%s",
            *(what, f"{count:,}", f"{len(rows):,}", f"{first:,}", more),
        )
