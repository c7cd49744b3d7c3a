"""Finds the values of tensors that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphft.errors import listed


def is_finite(values: Tensor) -> bool:
    """True if every value is, in one pass over the tensor then. Integers are not looked at."""
    if not (values.is_floating_point() or values.is_complex()):
        return True
    wide = torch.float32 if values.is_floating_point() and values.itemsize < 4 else None
    return bool(values.sum(dtype=wide).isfinite()) or bool(values.isfinite().all())


def nonfinite_of(tensors: Mapping[str, Tensor], initial: Mapping[str, Tensor] | None = None) -> dict[str, int]:
    """Counts the values, by name, that are not finite, and were so in `initial`: some buffers hold infinities."""
    counts = {}
    for name, value in tensors.items():
        if not is_finite(value.detach()):
            bad, first = ~value.detach().isfinite(), (initial or {}).get(name)
            if first is not None and first.shape == value.shape:
                bad &= first.to(value.device).isfinite()
            counts[name] = int(bad.sum())
    return {n: count for n, count in counts.items() if count}


def nonfinite_rows(values: Tensor) -> list[int]:
    """The indices along the first dimension where there is a value that is not finite."""
    bad = ~values.detach().isfinite()
    return bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if bad.ndim else []


def in_words(counts: Mapping[str, int]) -> str:
    return listed([f"{name} ({count} values)" for name, count in counts.items()])
