"""Describes the values of tensors in words: not finite, and between which whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

NAMES = 8
"""So many variables are named; of others the number."""


def is_finite(values: Tensor) -> bool:
    """True if every value is, in one pass over the tensor then. Integers are not looked at."""
    if not (values.is_floating_point() or values.is_complex()):
        return True
    wide = torch.float32 if values.is_floating_point() and values.itemsize < 4 else None
    return bool(values.sum(dtype=wide).isfinite()) or bool(values.isfinite().all())


def nonfinite_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Counts the values that are not finite, by the names of the tensors that have such."""
    counts = {n: int((~t.isfinite()).sum()) for n, t in tensors.items() if not is_finite(t.detach())}
    return {n: count for n, count in counts.items() if count}


def nonfinite_rows(values: Tensor) -> list[int]:
    """The indices along the first dimension where there is a value that is not finite."""
    bad = ~values.detach().isfinite()
    return bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if bad.ndim else []


def no_longer_finite(values: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, int]:
    """Counts the values, by name, that are not finite and were so at first: a buffer may hold a mask of infinities."""
    counts = {}
    for name, value in values.items():
        if not is_finite(value.detach()):
            bad, first = ~value.detach().isfinite(), initial.get(name)
            if first is not None and first.shape == value.shape:
                bad &= first.to(value.device).isfinite()
            counts[name] = int(bad.sum())
    return {n: count for n, count in counts.items() if count}


def listed(counts: Mapping[str, int]) -> str:
    named = ", ".join(f"{name} ({count} values)" for name, count in list(counts.items())[:NAMES])
    more = len(counts) - NAMES
    return named + (f" and {more} more" if more > 0 else "")


_WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def whole_numbers(columns: Mapping[str, Tensor], names: Callable[[Sequence[int]], list[str]]) -> str:
    """The smallest and the largest whole numbers of a batch in words, with their records; "" for a batch without any.

    A step failed perhaps on a class that there is not, or an index too large. `names` gives what a person finds the
    records of samples by.
    """
    found = [_range(name, value, names) for name, value in columns.items() if value.numel() and value.dtype in _WHOLE]
    return f" (the batch has {', '.join(found)})" if found else ""


def _range(name: str, value: Tensor, names: Callable[[Sequence[int]], list[str]]) -> str:
    per_sample = value.numel() // len(value)
    ends = [int(value.argmin()), int(value.argmax())]
    least, most = (int(value.reshape(-1)[place]) for place in ends)
    if least == most:
        return f"{name} {least} throughout"
    lowest, highest = names([place // per_sample for place in ends])
    return f"{name} from {least} ({lowest}) to {most} ({highest})"
