"""Reads ahead: one thread makes batches while the step before is computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from graphft.runtime.data.reader import Batch, BatchKey, NeedsCallingThread, Reader
from graphft.runtime.process.progress import READS_AHEAD


class Prefetcher:
    """Makes scheduled batches on one background thread. At most `depth` batches are queued or ready.

    A batch is a pure function of its key, so one that is never asked for (its slot went to another trainer) does no
    harm: it is dropped when newer ones need the place. To be used from one thread; `close()` ends the thread.
    """

    def __init__(self, reader: Reader, depth: int = 8, note: Callable[[BatchKey | None], object] = id) -> None:
        """`note` is called on the background thread with the key of what is made, and with None when it is made."""
        self.reader, self._depth, self._note = reader, depth, note
        self._batches: OrderedDict[BatchKey, Future[Batch]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=READS_AHEAD)

    def schedule(self, key: BatchKey) -> None:
        """Starts making the batch, unless that was asked for already. Never waits."""
        if self.reader.calling_thread or key in self._batches:
            return
        self._batches[key] = self._thread.submit(self._make, key)
        while len(self._batches) > self._depth:
            self._batches.popitem(last=False)[1].cancel()

    def get(self, key: BatchKey) -> Batch:
        """Returns the batch, made now if it was not scheduled. Raises what `Reader.batch` raised."""
        scheduled = self._batches.pop(key, None)
        if scheduled is None or scheduled.cancel():  # not begun: the thread is busy with others
            return self.reader.batch(*key)
        try:
            return scheduled.result()
        except NeedsCallingThread:
            return self.reader.batch(*key)

    def _make(self, key: BatchKey) -> Batch:
        self._note(key)
        try:
            return self.reader.batch(*key, ahead=True)
        finally:
            self._note(None)

    def close(self) -> None:
        """Drops what is queued, and waits for the batch that is being made."""
        self._batches.clear()
        self._thread.shutdown(cancel_futures=True)
