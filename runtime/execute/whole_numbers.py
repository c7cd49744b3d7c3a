"""Between what the whole numbers of a batch are: a step failed, on a class that there is not, or an index too large."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def whole_numbers(columns: Mapping[str, Tensor], names: Callable[[Sequence[int]], list[str]]) -> str:
    """In words, with the records that hold the smallest and the largest; "" for a batch without any.

    `names`: what a person finds records by, of samples of the batch.
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
