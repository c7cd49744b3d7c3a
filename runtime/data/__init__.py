"""Reading batches: a pure function of (seed, pass, chunk, batch), and a thread that does it ahead of use."""

from __future__ import annotations

from graphft.runtime.data.changes import CHANGED
from graphft.runtime.data.prefetch import BatchKey, Prefetcher
from graphft.runtime.data.reader import IN_ORDER, BadRecords, Reader, open_reader

__all__ = ["CHANGED", "IN_ORDER", "BadRecords", "BatchKey", "Prefetcher", "Reader", "open_reader"]
