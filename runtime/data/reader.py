"""Batches of described data: (pass, chunk, batch) gives the same bits in every process, at any time.

Of arrays that are stored, and of files: Parquet rows, byte ranges of CSV."""

from __future__ import annotations

import bisect
import functools
import io
import os
import random
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np
import torch

from graphft.data import ChunkInfo, DataSpec
from graphft.data.formats import Decoded, csv_header, decode_csv, decode_parquet, open_parquet
from graphft.data.spec import FOLDER, array_digest
from graphft.data.urls import CHANGED, REMEDY, DescribedFiles
from graphft.errors import LISTED, GraphftError, UsageError, describe, listed
from graphft.plan import record_order
from graphft.runtime.execute.determinism import SETTINGS_CHANGED
from graphft.runtime.process.progress import READS_AHEAD

IN_ORDER = -1
"""The pass that reads each chunk in the order of the data."""
CHECKED_BYTES = 256 << 20
"""A stored array of at most so many bytes is compared with its digest when it is opened (in about 0.2 s)."""

Batch = dict[str, torch.Tensor]


class BatchKey(NamedTuple):
    """Identifies a batch: the arguments of `Reader.batch`."""

    pass_index: int
    chunk: int
    batch_index: int
    batch_size: int
    without: frozenset[int] = frozenset()


class BadRecords(GraphftError):
    """Some records of a batch cannot be read, and the others can. `positions`: of the bad ones, in their chunk.

    `certain`: the file's bytes are no records, whoever reads them; then `positions` has all such records of the chunk.
    """

    def __init__(
        self, message: str, positions: Collection[int], *, rule: str = "read", help: str = "", certain: bool = False
    ) -> None:
        super().__init__(message, rule=rule, help=help)
        self.positions, self.certain = frozenset(positions), certain


class NeedsCallingThread(Exception):
    """A read ahead was given up: it draws random numbers, so the thread that uses the batch must wait for it."""


class Reader(ABC):
    """Reads batches; may be used from several threads."""

    calling_thread = False
    """True if the thread that uses a batch must wait while it is made (it draws from torch's generator)."""
    differs = ""
    """Warns of a record that is rounded otherwise in this process than where the data was described."""

    def __init__(self, spec: DataSpec, seed: int, cached_chunks: int) -> None:
        self.spec, self.seed = spec, seed
        self._order = functools.lru_cache(cached_chunks)(functools.partial(_order, seed))
        self._lock = threading.Lock()
        self.reading: BatchKey | None = None
        """The `batch` that is being read: one at a time, others wait for it."""

    def batch(
        self,
        pass_index: int,
        chunk: int,
        batch_index: int,
        batch_size: int,
        without: frozenset[int] = frozenset(),
        ahead: bool = False,
    ) -> Batch:
        """Returns records [batch_index * batch_size, + batch_size) of the chunk, in its order in this pass; by column.

        The last batch of a chunk may be shorter. `without`: positions in the chunk of records that are discarded; one
        record at least must be left. Raises GraphftError, with the chunk named, when reading fails.
        `ahead`: on another thread than the one that uses the batch; raises NeedsCallingThread for one that needs that.
        """
        key = BatchKey(pass_index, chunk, batch_index, batch_size, without)
        if not 0 <= chunk < len(self.spec.chunks):
            raise UsageError(f"there is no chunk {chunk}: the data has {len(self.spec.chunks)}", rule="data")
        info = self.spec.chunks[chunk]
        if batch_size < 1 or not 0 <= batch_index * batch_size < info.records:
            text = f"chunk {chunk} of {info.records} records has no batch {batch_index} of {batch_size}"
            raise UsageError(text, rule="data")
        try:
            with self._lock:
                self.reading = key
                try:
                    return self._read(info, self._positions(key), key, ahead)
                finally:
                    self.reading = None
        except NeedsCallingThread:
            raise
        except BaseException as e:  # SystemExit, too: user code must not end a trainer as if it were done
            not_the_chunks = isinstance(e, GraphftError) and e.rule in (CHANGED, SETTINGS_CHANGED)
            if not_the_chunks or isinstance(e, KeyboardInterrupt):
                raise
            what = f"reading chunk {chunk} ({self._where(info)}) failed: {describe(e)}"
            help = "see the error above; the data must stay as it was described"
            if isinstance(e, BadRecords):
                raise BadRecords(what, e.positions, help=help, certain=e.certain) from e
            raise GraphftError(what, rule="read", help=help) from e

    def numbers(self, key: BatchKey) -> list[int]:
        """Returns which records of the data a batch has, in its order."""
        with self._lock:
            positions = self._positions(key)
        return [int(position) + self.spec.first_records()[key.chunk] for position in positions]

    def names(self, records: Sequence[int]) -> list[str]:
        """Returns what a person finds `records` (of `numbers`) by: `line 219 of f.csv`, or `record 217`, counted from
        0. Never fails: where a file cannot be read now, it is the number."""
        found, first_records = [], self.spec.first_records()
        for record in records:
            chunk = bisect.bisect_right(first_records, record) - 1
            try:
                found.append(self._name(self.spec.chunks[chunk], record - first_records[chunk]))
            except (GraphftError, OSError):
                found.append(f"record {record}")
        return found

    def probe(self, chunk: int, number: int) -> bool | None:
        """Returns True if a record of another chunk of the same source can be read now; None if there is no other.
        `number`: which one of them, as one may be damaged itself."""
        others = neighbours(chunk, [self._source(info) for info in self.spec.chunks])
        if not others:
            return None
        info = self.spec.chunks[others[number % len(others)]]
        try:
            with self._lock:
                self._probe(info)
        except Exception as e:
            return not is_of_storage(e)
        return True

    def _positions(self, key: BatchKey) -> np.ndarray:
        start = key.batch_index * key.batch_size
        order = self._order(key.pass_index, self.spec.chunks[key.chunk])[start : start + key.batch_size]
        return order[~np.isin(order, list(key.without))] if key.without else order

    def _name(self, info: ChunkInfo, position: int) -> str:
        return f"record {info.start + position}"

    def _probe(self, info: ChunkInfo) -> None:
        """Reads a record of the chunk, from where it is stored."""
        self._read(info, np.zeros(1, np.int64), BatchKey(0, info.id, 0, 1), ahead=False)

    def _source(self, info: ChunkInfo) -> str:
        """Returns the folder of the chunk: what is away at the same time has the same one."""
        return ""

    def _where(self, info: ChunkInfo) -> str:
        return f"records {info.start} to {info.start + info.records}"

    @abstractmethod
    def _read(self, info: ChunkInfo, order: np.ndarray, key: BatchKey, ahead: bool) -> Batch:
        """Returns the records of `info` at `order` (positions inside the chunk)."""


def _order(seed: int, pass_index: int, info: ChunkInfo) -> np.ndarray:
    if pass_index == IN_ORDER:
        return np.arange(info.records)
    return record_order(seed, pass_index, info.id, info.records)


def neighbours(chunk: int, folders: Sequence[str]) -> list[int]:
    """Returns the other chunks of the same folder, from the next one on, around; or else of the same host or device."""
    others = [*range(chunk + 1, len(folders)), *range(chunk)]
    hosts = ["/".join(folder.split("/")[:3]) for folder in folders]
    return [c for c in others if folders[c] == folders[chunk]] or [c for c in others if hosts[c] == hosts[chunk]]


class ArrayReader(Reader):
    """Reads arrays: in memory when the description has them, else memory-mapped from the job's folder."""

    def __init__(self, spec: DataSpec, root: Path, seed: int, cached_chunks: int) -> None:
        super().__init__(spec, seed, cached_chunks)
        self._arrays = spec.values or {c: self._open(root / FOLDER / f"{c}.npy", c) for c in spec.columns}

    def _open(self, file: Path, column: str) -> np.ndarray:
        try:
            array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as e:
            help = "give the job's folder; DataSpec.store writes the arrays into it"
            raise UsageError(f"cannot read column {column} from {file}: {e}", rule="missing-file", help=help) from e
        shape, dtype = (self.spec.records, *self.spec.record_shape(column)), self.spec.types[column].dtype
        changed = ""
        if array.shape != shape or str(array.dtype) != dtype:
            changed = f"holds {array.dtype}{list(array.shape)}, the job expects {dtype}{list(shape)}"
        elif array.nbytes <= CHECKED_BYTES and array_digest(array) != self.spec.fingerprint()[column]:
            changed = "has other contents than when the job was saved"
        if changed:
            raise UsageError(f"{file} {changed}", rule=CHANGED, help="describe the data and the job again")
        return array

    def _read(self, info: ChunkInfo, order: np.ndarray, key: BatchKey, ahead: bool) -> Batch:
        return {c: torch.from_numpy(np.asarray(a[order + info.start])) for c, a in self._arrays.items()}


class Prefetcher:
    """Makes scheduled batches on one background thread, while the step before is computed. At most `depth` batches are
    queued or ready; the oldest are dropped. To be used from one thread; `close()` ends the background thread."""

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


# -- storage that is away ---------------------------------------------------------------------------------------------
#
# A read that failed is made again, with growing pauses. A chunk that fails while its neighbours can be read is bad.

WAIT_SECONDS, START_SECONDS = 300.0, 60.0
"""A trainer waits so long for storage that is away; and so long when it opens its data, at its start."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds between two tries: each pause is twice the one before, less up to a half of it by chance."""
GOOD_NEIGHBOURS = 5
"""A chunk is bad when so many reads of neighbours have succeeded, and its own failed each time; not before 1.5 s."""
_REMOTE = {"adlfs", "aiohttp", "asyncio", "azure", "botocore", "gcsfs", "google", "http", "requests", "s3fs", "urllib3"}
"""Packages whose exceptions tell of a network or a service, where they are no OSError (asyncio's: on Python 3.10)."""
_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)


def is_of_storage(error: BaseException | None) -> bool:
    """True if the error, or one that caused it, is of storage or the network: it may be another one later. A relative
    path, where there is nothing, is of this process's folder."""
    while error is not None:
        if isinstance(error, _NOTHING_THERE) and error.filename and not os.path.isabs(error.filename):
            return "://" in str(error.filename)
        packages = {str(base.__module__).partition(".")[0] for base in type(error).__mro__}
        if isinstance(error, OSError) or packages & _REMOTE:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


@dataclass(slots=True)
class Patience:
    """Decides about one read that fails again and again. `began`: when it failed first, in seconds; no clock here."""

    began: float
    limit: float = WAIT_SECONDS
    tries: int = 0
    good: int = 0

    def failed(self, now: float, neighbour: bool | None) -> Literal["wait", "bad", "away"]:
        """Returns what a failure means. `neighbour`: True if a record of another chunk could be read, None if there is
        none."""
        self.tries += 1
        self.good += neighbour is True
        if self.good >= GOOD_NEIGHBOURS:
            return "bad"
        if now - self.began < self.limit:
            return "wait"
        return "away" if neighbour is False else "bad"

    @property
    def pause(self) -> float:
        """Seconds until the next try: trainers that wait for the same storage do not all ask at once."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self.tries, 20)) * random.SystemRandom().uniform(0.5, 1)


class FileReader(Reader):
    """Decodes a chunk once, and keeps it while it is one of the last used. Raises GraphftError when a file is missing,
    or was changed since it was described."""

    def __init__(self, spec: DataSpec, seed: int, cached_chunks: int) -> None:
        super().__init__(spec, seed, cached_chunks)
        self._format, self._urls = spec.source["format"], spec.source["urls"]
        self._described = DescribedFiles(spec.source["stamps"], spec.source["storage_options"])
        self._chunk = functools.lru_cache(cached_chunks)(self._decode)
        for url in spec.fingerprint():
            with self._described.open(url):
                pass

    def _read(self, info: ChunkInfo, order: np.ndarray, key: BatchKey, ahead: bool) -> Batch:
        columns, bad = self._chunk(info)
        if bad.keys() & {int(i) for i in order}:
            first = sorted(bad)[:LISTED]
            places = self._places(info, first)
            text = listed([f"{places[i]}: {bad[i]}" for i in first], "; ", len(bad))
            raise BadRecords(text, bad, rule="data", certain=True)
        return {c: torch.from_numpy(a[order]) for c, a in columns.items()}

    def _probe(self, info: ChunkInfo) -> None:
        self._decode(info)  # never from the chunks that are kept

    def _url(self, info: ChunkInfo) -> str:
        return str(self._urls[info.file])

    def _where(self, info: ChunkInfo) -> str:
        return f"{super()._where(info)} of {self._url(info)}"

    def _source(self, info: ChunkInfo) -> str:
        return self._url(info).rpartition("/")[0]

    def _name(self, info: ChunkInfo, position: int) -> str:
        return self._places(info, [position])[position]

    def _places(self, info: ChunkInfo, positions: Iterable[int]) -> dict[int, str]:
        """Returns where records of the chunk are found, by position: their lines, where the format has lines."""
        name = self._url(info).rpartition("/")[2]
        if not info.line:
            return {i: f"record {info.start + i} of {name}" for i in positions}
        with self._described.open(self._url(info)) as f:
            lines, _ = self._lines(f, info)
        numbers = [info.line + i for i, line in enumerate(lines) if not line.isspace()]
        return {i: f"line {numbers[i]:,} of {name}" for i in positions}

    def _decode(self, info: ChunkInfo) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Returns the chunk's columns, of `info.records` rows each; and by position what is wrong with bad records,
        whose rows mean nothing."""
        decoded = self._decoded(info)
        if decoded.records != info.records:
            what = f"there are {decoded.records} records, {info.records} when described"
            raise UsageError(what, rule="data", help=REMEDY)
        columns = {}
        for column, names in self.spec.source["fields"].items():
            values = np.concatenate([decoded.fields[n] for n in names], axis=1)
            columns[column] = values.reshape(-1, *self.spec.record_shape(column))
        return columns, {i: ", ".join(texts.values()) for i, texts in decoded.bad.items()}

    def _decoded(self, info: ChunkInfo) -> Decoded:
        dtypes = {f: self.spec.types[c].dtype for c, fs in self.spec.source["fields"].items() for f in fs}
        with self._described.open(self._url(info)) as f:
            if self._format == "parquet":
                opened = open_parquet(f, self._url(info))
                return decode_parquet(opened, info.start, info.records, dtypes, self.spec.source["lists"])
            lines, header = self._lines(f, info)
        return decode_csv(lines, header, dtypes)

    def _lines(self, f: IO[bytes], info: ChunkInfo) -> tuple[list[bytes], list[str]]:
        """Returns the chunk's lines of CSV, and the fields' names."""
        header = csv_header(f.readline(), self._url(info))
        f.seek(info.offset)
        return io.BytesIO(f.read(info.size)).readlines(), header
