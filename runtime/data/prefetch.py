"""Reading ahead: one thread makes batches while the step before is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from graphft.runtime.data.randomness import NeedsCallingThread
from graphft.runtime.data.reader import Reader
from graphft.runtime.process.progress import READS_AHEAD


class BatchKey(NamedTuple):
    """What identifies a batch: the arguments of `Reader.batch`."""

    pass_index: int
    chunk: int
    batch_index: int
    batch_size: int
    without: frozenset[int] = frozenset()


class Prefetcher:
    """Makes scheduled batches on one background thread. At most `depth` batches are queued or ready.

    A batch is a pure function of its key, so one that is never asked for (its slot went to another trainer) does no
    harm: it is dropped when newer ones need the place. To be used from one thread; `close()` ends the thread.
    """

    def __init__(self, reader: Reader, depth: int = 8, note: Callable[[BatchKey | None], object] = id) -> None:
        """`note` is told, on the background thread, what is being made, and that nothing is any more."""
        self._note = note
        self._reader, self._depth = reader, depth
        self._batches: OrderedDict[BatchKey, Future[dict[str, torch.Tensor]]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=READS_AHEAD)

    def schedule(self, key: BatchKey) -> None:
        """Starts making the batch, unless that was asked for already. Never waits."""
        if self._reader.calling_thread or key in self._batches:
            return
        self._batches[key] = self._thread.submit(self._make, key)
        while len(self._batches) > self._depth:
            self._batches.popitem(last=False)[1].cancel()

    def get(self, key: BatchKey) -> dict[str, torch.Tensor]:
        """The batch, made now if it was not scheduled. Raises what `Reader.batch` raised."""
        scheduled = self._batches.pop(key, None)
        if scheduled is None or scheduled.cancel():  # not begun: the thread is busy with others
            return self._reader.batch(*key)
        try:
            return scheduled.result()
        except NeedsCallingThread:
            return self._reader.batch(*key)

    def numbers(self, key: BatchKey) -> list[int]:
        """Which records of the data a batch has, in its order."""
        return self._reader.numbers(*key)

    def names(self, records: Sequence[int]) -> list[str]:
        """What a person finds these records of the data by."""
        return self._reader.names(records)

    def _make(self, key: BatchKey) -> dict[str, torch.Tensor]:
        self._note(key)
        try:
            return self._reader.batch(*key, ahead=True)
        finally:
            self._note(None)

    @property
    def reading(self) -> BatchKey | None:
        """What is being read now, by whichever thread: all others wait for it. From any thread."""
        now = self._reader.reading
        return BatchKey(*now) if now is not None else None

    def close(self) -> None:
        """Drops what is queued, and waits for the batch that is being made."""
        self._batches.clear()
        self._thread.shutdown(cancel_futures=True)
