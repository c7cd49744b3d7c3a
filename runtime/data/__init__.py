"""Reads batches: each is a pure function of (seed, pass, chunk, batch); a thread may read them ahead of use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graphft.data import DataSpec
from graphft.data.urls import CHANGED
from graphft.errors import UsageError
from graphft.runtime.data.dataset_reader import DatasetReader, reset_signals_in_forks
from graphft.runtime.data.reader import (
    IN_ORDER,
    ArrayReader,
    BadRecords,
    BatchKey,
    FileReader,
    NeedsCallingThread,
    Prefetcher,
    Reader,
)

__all__ = [
    "CHANGED",
    "IN_ORDER",
    "BadRecords",
    "BatchKey",
    "NeedsCallingThread",
    "Prefetcher",
    "Reader",
    "open_reader",
    "reset_signals_in_forks",
]


def open_reader(
    spec: DataSpec,
    root: str | os.PathLike[str],
    seed: int,
    cached_chunks: int = 8,
    thread: ThreadPoolExecutor | None = None,
) -> Reader:
    """Opens the data described by `spec`; `root` is the job's folder, where `spec.store` put what it stores.

    `cached_chunks` decoded chunks are kept: at least the number of chunks that are read alternately (the slots that a
    trainer works for) plus one. `thread`, of one thread, makes and reads a Dataset whose reader is used from several:
    what it keeps may belong to the thread that made it (sqlite3.connect, threading.local); and no read of two Datasets
    overlaps. Raises GraphftError when the data is missing or is no longer as described.
    """
    if spec.kind == "arrays":
        return ArrayReader(spec, Path(root), seed, cached_chunks)
    if spec.kind == "dataset":
        return DatasetReader(spec, seed, cached_chunks, thread)
    if spec.kind == "files":
        return FileReader(spec, seed, cached_chunks)
    raise UsageError(f"unknown kind of data: {spec.kind!r}", rule="data", help="kinds are arrays, dataset and files")
