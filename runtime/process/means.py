"""Means whose sums do not overflow: where all values are finite, so is their mean."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

import numpy as np

SHRINK = 2.0**-70
"""A power of two, so that products have the same digits; 2 ** 62 samples do not make up for it."""
_LARGEST = sys.float_info.max * SHRINK


def mean_of(values: Iterable[tuple[float, int]]) -> float:
    """Of (value, samples): weighted by samples, added up in this order. NaN without samples."""
    found = tuple(values)
    samples = sum(count for _, count in found)
    if not samples:
        return math.nan
    mean = sum(value * count for value, count in found) / samples
    return mean if math.isfinite(mean) else grow(sum(value * SHRINK * count for value, count in found) / samples)


def grow(mean: float) -> float:
    """Of values that were multiplied by SHRINK: theirs."""
    if math.isinf(mean) or math.isnan(mean):
        return mean
    return min(max(mean, -_LARGEST), _LARGEST) / SHRINK  # a mean that was rounded up may be above all of its values


def means_of(values: np.ndarray, samples: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """As `mean_of`, of consecutive groups, which begin at `starts`; float64."""
    counts = np.add.reduceat(samples, starts)
    with np.errstate(over="ignore", invalid="ignore"):
        means = np.add.reduceat(values * samples, starts) / counts
        if np.isfinite(means).all():
            return means
        shrunk = np.add.reduceat(values * SHRINK * samples, starts) / counts
        grown = np.where(np.isinf(shrunk), shrunk, np.clip(shrunk, -_LARGEST, _LARGEST) / SHRINK)
    return np.where(np.isfinite(means), means, grown)
