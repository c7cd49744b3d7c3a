"""Batches of a described data set: (pass, chunk, batch) gives the same bits in every process, at any time."""

from __future__ import annotations

import bisect
import functools
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from graphft.data import FOLDER, ChunkInfo, DataSpec
from graphft.data_fingerprint import array_digest, dataset_fingerprint
from graphft.data_generators import own_generators, seed_generators
from graphft.data_reference import Reference, named
from graphft.data_seeding import seeded
from graphft.errors import GraphftError, UsageError, describe
from graphft.plan import mix, record_order
from graphft.runtime.data.changes import CHANGED
from graphft.runtime.data.forks import forks_end_here
from graphft.runtime.data.formats import ChunkFiles
from graphft.runtime.data.randomness import DrawWatch, NeedsCallingThread
from graphft.runtime.data.storage_away import is_of_storage, neighbours_of
from graphft.runtime.execute.determinism import SETTINGS_CHANGED, process_settings, thread_settings
from graphft.runtime.process.interrupts import raised_by_user_code

log = logging.getLogger("graphft")
T = TypeVar("T")

IN_ORDER = -1
"""The pass that reads each chunk in the order of the data."""
LISTED = 5
"""Bad records that a message names."""
CHECKED_BYTES = 256 << 20
"""A stored array of at most so many bytes is compared with its digest when it is opened (in about 0.2 s)."""


def open_reader(
    spec: DataSpec,
    root: str | os.PathLike[str],
    seed: int,
    cached_chunks: int = 8,
    thread: ThreadPoolExecutor | None = None,
) -> Reader:
    """A reader of the data described by `spec`; `root` is the job's folder, where `spec.store` put what it stores.

    `cached_chunks` decoded chunks are kept; give it at least the number of chunks that are read alternately (the
    slots that a trainer works for) plus one. `thread`, of one thread, makes and reads a Dataset whose
    reader is used from several: what it keeps may belong to the thread that made it (sqlite3.connect, threading.local).
    Raises GraphftError when the data is missing or is no longer as described.
    """
    if spec.kind == "arrays":
        return ArrayReader(spec, Path(root), seed, cached_chunks)
    if spec.kind == "dataset":
        return DatasetReader(spec, seed, cached_chunks, thread)
    if spec.kind == "files":
        return FileReader(spec, seed, cached_chunks)
    raise UsageError(f"unknown kind of data: {spec.kind!r}", rule="data", help="kinds are arrays, dataset and files")


class BadRecords(GraphftError):
    """Some records of a batch cannot be read, and the others can. `positions`: of the bad ones, in their chunk.

    `certain`: the file's bytes are no records, whoever reads them; then `positions` has all such records of the chunk.
    """

    def __init__(
        self, message: str, positions: Collection[int], *, rule: str = "read", help: str = "", certain: bool = False
    ) -> None:
        super().__init__(message, rule=rule, help=help)
        self.positions, self.certain = frozenset(positions), certain


class Reader(ABC):
    """Reads batches; may be used from several threads."""

    calling_thread = False
    """True if the thread that uses a batch must wait while it is made (it draws from torch's generator)."""

    def __init__(self, spec: DataSpec, seed: int, cached_chunks: int) -> None:
        self.spec, self.seed = spec, seed
        self._order = functools.lru_cache(cached_chunks)(functools.partial(_order, seed))
        self._lock = threading.Lock()
        self.reading: tuple[int, int, int, int, frozenset[int]] | None = None
        """The arguments of the `batch` that is being read: one at a time, others wait for it."""

    def take_turns(self, other: Reader) -> None:
        """From now on no read of the two overlaps one of the other: a Dataset's draws from Python's and NumPy's
        generators are found by what these are at before and after."""
        self._lock = other._lock

    def batch(
        self,
        pass_index: int,
        chunk: int,
        batch_index: int,
        batch_size: int,
        without: frozenset[int] = frozenset(),
        ahead: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Records [batch_index * batch_size, + batch_size) of the chunk, in its order in this pass; by column.

        The last batch of a chunk may be shorter. `without`: positions in the chunk of records that are left out; one
        record at least must be left. Raises GraphftError, with the chunk named, when reading fails.
        `ahead`: on another thread than the one that uses the batch; raises NeedsCallingThread for one that needs that.
        """
        if not 0 <= chunk < len(self.spec.chunks):
            raise UsageError(f"there is no chunk {chunk}: the data has {len(self.spec.chunks)}", rule="data")
        info = self.spec.chunks[chunk]
        start = batch_index * batch_size
        if batch_size < 1 or not 0 <= start < info.records:
            raise UsageError(
                f"chunk {chunk} of {info.records} records has no batch {batch_index} of {batch_size}", rule="data"
            )
        try:
            with self._lock:
                self.reading = (pass_index, chunk, batch_index, batch_size, without)
                try:
                    order = self._places(pass_index, info, start, batch_size, without)
                    return self._read(info, order, (self.seed, pass_index, chunk, batch_index), ahead)
                finally:
                    self.reading = None
        except NeedsCallingThread:
            raise
        except BaseException as e:  # SystemExit, too: user code must not end a trainer as if it were done
            not_the_chunks = isinstance(e, GraphftError) and e.rule in (CHANGED, SETTINGS_CHANGED)
            if not_the_chunks or (isinstance(e, KeyboardInterrupt) and not raised_by_user_code()):
                raise
            what = f"reading chunk {chunk} ({self._where(info)}) failed: {describe(e)}"
            help = "see the error above; the data must stay as it was described"
            if isinstance(e, BadRecords):
                raise BadRecords(what, e.positions, help=help, certain=e.certain) from e
            raise GraphftError(what, rule="read", help=help) from e

    def numbers(
        self, pass_index: int, chunk: int, batch_index: int, batch_size: int, without: frozenset[int] = frozenset()
    ) -> list[int]:
        """Which records of the data a batch has, in its order. The arguments are those of `batch`."""
        info, first = self.spec.chunks[chunk], self.spec.first_records()[chunk]
        with self._lock:
            places = self._places(pass_index, info, batch_index * batch_size, batch_size, without)
        return [int(place) + first for place in places]

    def names(self, records: Sequence[int]) -> list[str]:
        """What a person finds them by: `line 219 of f.csv`; `record 217`, counted from 0, where there are no lines.

        `records`: numbers as `numbers` returns them. Never fails: where a file cannot be read now, it is the number.
        """
        found, first_records = [], self.spec.first_records()
        for record in records:
            chunk = bisect.bisect_right(first_records, record) - 1
            try:
                found.append(self._name(self.spec.chunks[chunk], record - first_records[chunk]))
            except (GraphftError, OSError):
                found.append(f"record {record}")
        return found

    def _name(self, info: ChunkInfo, position: int) -> str:
        return f"record {info.start + position}"

    def _places(
        self, pass_index: int, info: ChunkInfo, start: int, batch_size: int, without: frozenset[int]
    ) -> np.ndarray:
        order = self._order(pass_index, info)[start : start + batch_size]
        return order[~np.isin(order, list(without))] if without else order

    def probe(self, chunk: int, number: int) -> bool | None:
        """Whether a record of another chunk of the same source can be read now; None if there is no other chunk.

        `number`: which one, of those around it, so that one that is damaged itself is not asked again and again.
        """
        others = list(neighbours_of(chunk, [self._source(info) for info in self.spec.chunks]))
        if not others:
            return None
        info = self.spec.chunks[others[number % len(others)]]
        try:
            with self._lock:
                self._look_at(info)
        except Exception as e:
            return not is_of_storage(e)
        return True

    def _look_at(self, info: ChunkInfo) -> None:
        """Reads a record of the chunk, from where it is stored."""
        self._read(info, np.zeros(1, np.int64), (self.seed, 0, info.id, 0), ahead=False)

    def _source(self, info: ChunkInfo) -> str:
        """Where the chunk is stored: what is away at the same time has the same name."""
        return ""

    def _where(self, info: ChunkInfo) -> str:
        return f"records {info.start} to {info.start + info.records}"

    @abstractmethod
    def _read(
        self, info: ChunkInfo, order: np.ndarray, key: tuple[int, int, int, int], ahead: bool
    ) -> dict[str, torch.Tensor]:
        """The records of `info` at `order` (positions inside the chunk). `key` identifies the batch."""


def _order(seed: int, pass_index: int, info: ChunkInfo) -> np.ndarray:
    if pass_index == IN_ORDER:
        return np.arange(info.records)
    return record_order(seed, pass_index, info.id, info.records)


class ArrayReader(Reader):
    """Arrays: in memory when the description has them, else memory-mapped from the job's folder."""

    def __init__(self, spec: DataSpec, root: Path, seed: int, cached_chunks: int) -> None:
        super().__init__(spec, seed, cached_chunks)
        self._arrays = spec.values or {c: self._open(root / FOLDER / f"{c}.npy", c) for c in spec.columns}

    def _open(self, file: Path, column: str) -> np.ndarray:
        try:
            array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as e:
            raise UsageError(
                f"cannot read column {column} from {file}: {e}",
                rule="missing-file",
                help="give the job's folder; DataSpec.store writes the arrays into it",
            ) from e
        shape, dtype = (self.spec.records, *self.spec.record_shape(column)), self.spec.types[column].dtype
        changed, described = "", self.spec.fingerprint().get(column)
        if array.shape != shape or str(array.dtype) != dtype:
            changed = f"holds {array.dtype}{list(array.shape)}, the job expects {dtype}{list(shape)}"
        elif described and array.nbytes <= CHECKED_BYTES and array_digest(array) != described:
            changed = "has other contents than when the job was saved"
        if changed:
            help = "the file was changed: describe the data and the job again"
            raise UsageError(f"{file} {changed}", rule=CHANGED, help=help)
        return array

    def _read(
        self, info: ChunkInfo, order: np.ndarray, key: tuple[int, int, int, int], ahead: bool
    ) -> dict[str, torch.Tensor]:
        rows = order + info.start
        return {c: torch.from_numpy(np.asarray(a[rows])) for c, a in self._arrays.items()}


class FileReader(Reader):
    """Files: a chunk is decoded once, and kept while it is one of the last used."""

    def __init__(self, spec: DataSpec, seed: int, cached_chunks: int) -> None:
        super().__init__(spec, seed, cached_chunks)
        self._files = ChunkFiles(spec)
        self._chunk = functools.lru_cache(cached_chunks)(self._files.read)

    def _where(self, info: ChunkInfo) -> str:
        return f"{super()._where(info)} of {self._files.url(info)}"

    def _source(self, info: ChunkInfo) -> str:
        return self._files.url(info).rpartition("/")[0]

    def _name(self, info: ChunkInfo, position: int) -> str:
        return self._files.names(info, [position])[position]

    def _look_at(self, info: ChunkInfo) -> None:
        self._files.read(info)  # never from the chunks that are kept

    def _read(
        self, info: ChunkInfo, order: np.ndarray, key: tuple[int, int, int, int], ahead: bool
    ) -> dict[str, torch.Tensor]:
        chunk = self._chunk(info)
        if chunk.bad.keys() & {int(i) for i in order}:
            again = self._files.read(info)
            bad = sorted(chunk.bad.keys() & again.bad.keys())
            if not bad:
                self._chunk.cache_clear()
                return self._read(info, order, key, ahead)
            listed = "; ".join(again.bad[i] for i in bad[:LISTED])
            more = f"; and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
            raise BadRecords(listed + more, bad, rule="data", certain=True)
        return {c: torch.from_numpy(a[order]) for c, a in chunk.columns.items()}


class DatasetReader(Reader):
    """A map-style Dataset: made when the reader is opened, only the records of a batch are asked for. All code of the
    user's runs on `thread`, if there is one.

    Generators that the dataset keeps are seeded before every batch. Every read is watched for draws from the global
    ones. Once there was one, the thread that uses a batch waits for it, seeded; a batch for which nothing is drawn is
    the same either way.
    """

    def __init__(self, spec: DataSpec, seed: int, cached_chunks: int, thread: ThreadPoolExecutor | None = None) -> None:
        super().__init__(spec, seed, cached_chunks)
        self._thread = thread
        self._call(lambda: self._open(spec))

    def _call(self, function: Callable[[], T]) -> T:
        return function() if self._thread is None else self._thread.submit(function).result()

    def _open(self, spec: DataSpec) -> None:
        reference, before = Reference.from_json(spec.source), thread_settings()
        with forks_end_here():
            self._dataset = reference.make()
        self._own = own_generators(self._dataset)
        _check_same(before, thread_settings(), "making the dataset")
        self.calling_thread = bool(spec.source["random"])
        self._trusted = bool(spec.source.get("trusted", False))
        code = dataset_fingerprint(reference.file, reference.module, reference.args, spec.records)["code"]
        if code != spec.fingerprint().get("code", code):
            raise UsageError(
                f"the source of the dataset, {reference.file or reference.module}, was changed since "
                "the job was described",
                rule=CHANGED,
                help="put it back as it was; or run the changed script again, which begins a run of its own",
            )
        self._settings = process_settings() | before  # a thread of its own begins with the same
        if len(self._dataset) != spec.records:
            raise UsageError(
                f"the dataset of {reference} has {len(self._dataset)} records, the job expects {spec.records}",
                rule="data",
                help="describe the data and the job again",
            )

    def _read(
        self, info: ChunkInfo, order: np.ndarray, key: tuple[int, int, int, int], ahead: bool
    ) -> dict[str, torch.Tensor]:
        indices = [int(i) + info.start for i in order]
        return self._call(lambda: self._checked(info, indices, key, ahead))

    def _checked(
        self, info: ChunkInfo, indices: list[int], key: tuple[int, int, int, int], ahead: bool
    ) -> dict[str, torch.Tensor]:
        try:
            return self._make(info, indices, key, ahead)
        finally:  # also when it raised: else this process's bits would depend on who read what, and when
            _check_same(
                self._settings,
                process_settings() | thread_settings(),
                f"reading some of the records {min(indices)} to {max(indices)}",
                "set them where the dataset's module is loaded, or in its __init__; or ",
            )

    def _make(
        self, info: ChunkInfo, indices: list[int], key: tuple[int, int, int, int], ahead: bool
    ) -> dict[str, torch.Tensor]:
        if not self.calling_thread:
            watch = DrawWatch(operators=not self._trusted)
            batch = watch.read(lambda: self._batch(indices, key))
            if batch is not None and not watch.drew:
                return batch
            log.info(
                "the dataset draws random numbers (seen in chunk %d): from now on no batch is made ahead, and "
                "each is seeded",
                info.id,
            )
            self.calling_thread = True
        if ahead:
            raise NeedsCallingThread
        with seeded(mix(*key)):
            return self._batch(indices, key)

    def _batch(self, indices: list[int], key: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
        seed_generators(self._own, mix(*key))
        many = getattr(self._dataset, "__getitems__", None)
        try:
            with forks_end_here():  # parts of items may be made when asked for: that is user code, too
                return self._collate(many(indices) if many else [self._dataset[i] for i in indices])
        except Exception as error:
            self._blame(many or (lambda one: [self._dataset[i] for i in one]), indices, error)
            raise

    def _blame(self, read: Callable[[list[int]], Any], indices: list[int], error: Exception) -> None:
        """Raises BadRecords if some of the records cannot be read, asked for one by one, and the others can."""
        if is_of_storage(error):
            return  # which may answer again in between
        bad = [i for i in indices if not _works(read, i)]
        if bad and len(bad) < len(indices):
            start = next(c.start for c in self.spec.chunks if c.start <= bad[0] < c.start + c.records)
            text = f"of {len(indices)} records only {', '.join(map(str, bad[:LISTED]))}"
            more = f" and {len(bad) - LISTED} more" if len(bad) > LISTED else ""
            raise BadRecords(f"{text}{more} cannot be read: {describe(error)}", [i - start for i in bad]) from error

    def _collate(self, items: Sequence[Any]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = default_collate([named(item, self.spec.columns) for item in items])
        for column, tensor in batch.items():
            shape, dtype = (len(items), *self.spec.record_shape(column)), self.spec.types[column].dtype
            if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
                raise GraphftError(
                    f"column {column} is {tensor.dtype}{list(tensor.shape)}, described as torch.{dtype}{list(shape)}",
                    rule="columns",
                    help="make all records alike",
                )
        return batch


def _works(read: Callable[[list[int]], Any], index: int) -> bool:
    try:
        with forks_end_here():
            read([index])
    except Exception:
        return False
    return True


def _check_same(before: Mapping[str, object], now: Mapping[str, object], what: str, better: str = "") -> None:
    """Raises GraphftError[settings-changed] if user code has changed what all of this process computes with."""
    if changed := [f"{n}: {before[n]} -> {now[n]}" for n in now if now[n] != before[n]]:
        raise UsageError(
            f"{what} changed settings: {', '.join(changed)}",
            rule=SETTINGS_CHANGED,
            help=f"{better}set them back before it returns",
        )
