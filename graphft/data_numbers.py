"""Fields of files as numbers: what reading a chunk makes of them, and what is looked at when files are described."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from graphft.errors import GraphftError, UsageError

log = logging.getLogger("graphft")
ROWS_AT_ONCE = 1 << 16


def numbers(values: Iterable[Any], dtype: str, field: str) -> np.ndarray:
    """The field's values as `dtype`; missing ones (None, NaN) are NaN where the dtype is floating.

    An integer dtype takes integers of its range, and no value is changed: 3.0 is 3, and 3.5 is an error. A floating
    dtype rounds to its nearest number. Texts are numbers in ASCII, without `_`. Each value is converted by itself:
    values that fit one by one fit together. Raises UsageError.
    """
    target = np.dtype(dtype)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iufb":
        return _array_as(values, target, field)
    values = [None if v is None or v != v else v for v in values]
    if None in values and target.kind != "f":
        raise UsageError(
            f"field {field} is empty in record {values.index(None)} of the chunk",
            rule="data",
            help=f"{dtype} has no NaN: give the column a floating dtype, or fill the field",
        )
    try:
        _check_texts("".join(v for v in values if isinstance(v, str)))
        if target.kind == "f":
            return _array_as(np.array([math.nan if v is None else float(v) for v in values], "float64"), target, field)
        return _integers(values, target)
    except (TypeError, ValueError, OverflowError) as e:
        raise UsageError(
            f"field {field} is not {dtype} everywhere: {e}", rule="data", help="encode it as numbers first"
        ) from e


def _array_as(array: np.ndarray, target: np.dtype[Any], field: str) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is told when files are described
        result = array.astype(target)
    if target.kind != "f" and not (np.array_equal(result, array) and _below_end(array, target)):
        raise UsageError(
            f"field {field} has values that are no {target}",
            rule="data",
            help="give the column a larger or floating dtype, or fill what is missing",
        )
    return result


def _below_end(array: np.ndarray, target: np.dtype[Any]) -> bool:
    """Some processors make 2.0**63 the largest int64, which NumPy's comparison takes for equal."""
    return array.dtype.kind != "f" or target.kind not in "iu" or bool((array < float(np.iinfo(target).max) + 1).all())


def _check_texts(text: str) -> None:
    """Python's own conversions take more than is a number in a file."""
    if "_" in text or not text.isascii():
        raise ValueError("a number is written in ASCII, without '_'")


def _integers(values: Sequence[Any], target: np.dtype[Any]) -> np.ndarray:
    """Raises ValueError, OverflowError, TypeError."""
    whole = [v if type(v) is int else _integer(v) for v in values]
    low, high = (0, 1) if target.kind == "b" else (int(np.iinfo(target).min), int(np.iinfo(target).max))
    if whole and not (low <= min(whole) and max(whole) <= high):
        raise OverflowError(f"{target} holds {low} to {high}")
    return np.array(whole, target)


def _integer(value: Any) -> int:
    number = int(value)
    if not isinstance(value, str) and number != value:
        raise ValueError(f"{value} is no integer")
    return number


def fits(value: Any, dtype: str) -> bool:
    """Whether a field's value can be read as `dtype`."""
    try:
        return numbers([value], dtype, "").shape == (1,)
    except GraphftError:
        return False


def is_infinite(value: Any, dtype: str) -> bool:
    """Whether a value that fits the floating `dtype` is infinite in it: it says so, or it is too large."""
    return bool(np.isinf(numbers([value], dtype, "")[0]))


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
