"""Descriptions of data: plain data that travels with the job as JSON, with the records divided into chunks, the unit
that the queue hands out. `arrays`, `dataset` and `files` make one; `graphft.runtime.data` reads it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphft.errors import GraphftError, UsageError, shown_plainly
from graphft.ir import Type
from graphft.options import is_whole
from graphft.plan import Plan

if TYPE_CHECKING:
    import torch

FOLDER = "data"
"""The part of the job's folder in which `DataSpec.store` puts arrays."""
AS_FOUND = ("fingerprint", "stamps", "samples", "folder", "argv")
"""Entries of `DataSpec.source` that say what the data was when it was described: no part of `DataSpec.options`."""
DIGITS = 16
"""Hexadecimal digits of a digest."""


def digest(*parts: Any) -> str:
    """Returns the digest of bytes, or of what supports the buffer protocol; a str counts as its UTF-8."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
    return made.hexdigest()[:DIGITS]


def array_digest(array: np.ndarray) -> str:
    """Returns the digest of dtype, shape and contents of a C-contiguous array, without a copy."""
    return digest(f"{array.dtype.str} {array.shape}\n", array.reshape(-1).view(np.uint8))


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A range of records: `records` of them from record `start` of its source (file number `file`, if it has files).

    `offset` and `size` are its byte range, and `line` is its first line (from 1), of CSV.
    """

    id: int
    records: int
    start: int = 0
    file: int = 0
    offset: int = 0
    size: int = 0
    line: int = 0


@dataclass(frozen=True, slots=True)
class DataSpec:
    """A job's data. `types` are those of a batch, by column: `x` -> `float32[batch, 8]`.

    `source` is what the reader of this `kind` needs, JSON-serialisable. `values` holds the arrays of an `arrays`
    description that was not stored yet; it is no part of the JSON.
    """

    kind: str
    types: dict[str, Type]
    chunks: tuple[ChunkInfo, ...]
    source: dict[str, Any]
    values: dict[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.types)

    @property
    def records(self) -> int:
        """Number of records of one epoch."""
        return sum(c.records for c in self.chunks)

    def first_records(self) -> list[int]:
        """Returns by chunk the number of its first record in the data; `ChunkInfo.start` is counted in its file."""
        return [0, *itertools.accumulate(c.records for c in self.chunks[:-1])]

    def record_shape(self, column: str) -> tuple[int, ...]:
        """Returns the shape of one record's entry in a column."""
        return tuple(map(int, (self.types[column].shape or ())[1:]))

    def steps(
        self, batch_size: int, trainers: int = 1, epochs: int = 1, *, seed: int = 0, drop_last: bool = False
    ) -> int:
        """Steps of a sync job of this data, for a schedule of the learning rate. `trainers`, `epochs`: a Trainer's
        num_workers, and how many it is to train; `transpile` calls these trainers and epochs.

        An epoch is as long as its longest slot: with chunks of several lengths, that depends on the order of the
        epoch, and so on `seed`.
        """
        records = [chunk.records for chunk in self.chunks]
        return Plan(
            records, slots=trainers, batch_size=batch_size, seed=seed, passes=epochs, drop_last=drop_last
        ).total_steps

    def batches(self, batch_size: int, drop_last: bool = False) -> tuple[int, ...]:
        """Returns the number of batches of every chunk. Its last batch is shorter, or left out with `drop_last`.

        Raises GraphftError when every chunk is shorter than a batch.
        """
        longest = max(c.records for c in self.chunks)
        if longest < batch_size:
            text = f"the longest chunk has {longest} of {self.records} records, fewer than one batch of {batch_size}"
            help = "give more data, a larger chunk_size, or a smaller batch_size"
            raise GraphftError(text, rule="short-chunks", help=help)
        return tuple(c.records // batch_size if drop_last else math.ceil(c.records / batch_size) for c in self.chunks)

    def store(self, folder: str | os.PathLike[str]) -> None:
        """Writes arrays into the job's `folder`, as `data/<column>.npy`; each file appears whole or not at all."""
        target = Path(folder) / FOLDER
        for column, array in self.values.items():
            target.mkdir(parents=True, exist_ok=True)
            part = target / f".{column}.{os.getpid()}.part"
            with part.open("wb") as f:
                np.save(f, array, allow_pickle=False)
            part.replace(target / f"{column}.npy")

    def fingerprint(self) -> dict[str, str]:
        """Returns short digests that tell this data from other data of the same description: of each array; of a
        dataset's `code`, `args`, `records` and some `items`; of each file. Raises GraphftError for an array that was
        changed since."""
        found = dict(self.source.get("fingerprint", {}))
        if changed := [name for name, array in self.values.items() if array_digest(array) != found[name]]:
            text = f"column {changed[0]} was changed in place after graphft.arrays(...) was called with it"
            raise GraphftError(text, rule="data-changed", help="call arrays when the data are complete; or give a copy")
        return found

    def options(self) -> dict[str, Any]:
        """Returns the JSON without what the data was when it was described."""
        return self.to_json() | {"source": {k: v for k, v in self.source.items() if k not in AS_FOUND}}

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "types": {c: [t.dtype, *self.record_shape(c)] for c, t in self.types.items()},
            "chunks": [(c.records, c.start, c.file, c.offset, c.size, c.line) for c in self.chunks],
            "source": self.source,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DataSpec:
        """Returns the inverse of `to_json`. Raises GraphftError when `data` is no description."""
        try:
            types = {c: Type(dtype, ("batch", *shape)) for c, (dtype, *shape) in data["types"].items()}
            chunks = tuple(ChunkInfo(i, *map(int, c)) for i, c in enumerate(data["chunks"]))
            return DataSpec(str(data["kind"]), types, chunks, dict(data["source"]))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            help = "describe the data with graphft.arrays, dataset or files"
            raise UsageError(f"this is no description of data: {e!r}", rule="data", help=help) from e


def split(records: int, chunk_size: int) -> list[tuple[int, int]]:
    """Divides `records` into ranges (start, length) of `chunk_size`; the last may be shorter."""
    check_chunk_size(chunk_size)
    return [(start, min(chunk_size, records - start)) for start in range(0, records, chunk_size)]


def check_chunk_size(chunk_size: int) -> None:
    if not is_whole(chunk_size, 1):
        help = "a chunk is what a trainer claims at a time: take some batches' worth of records"
        raise GraphftError(f"chunk_size is {chunk_size!r}, expected 1 or more", rule="chunk-size", help=help)


def check_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """Returns the names. Raises GraphftError[columns] unless they are Python identifiers, as inputs are, each once."""
    names = tuple(columns)
    bad = [n for n in names if not n.isidentifier()]
    if not names or bad or len(set(names)) < len(names):
        text = f"columns are {names}, expected different Python identifiers"
        raise _columns(text, "name them like the program's inputs")
    return names


def torch_dtype(name: str, dtype: np.dtype[Any] | torch.dtype | str) -> str:
    """Returns the name of the torch dtype that holds `dtype`. Raises GraphftError when there is none."""
    import torch

    dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    try:
        return str(torch.from_numpy(np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype).removeprefix("torch.")
    except TypeError:
        text = f"column {name} has dtype {dtype}, which is no tensor's"
        raise _columns(text, "encode it as numbers: float32, int64") from None


def _columns(text: str, help: str) -> GraphftError:
    return GraphftError(text, rule="columns", help=help)


@shown_plainly
def arrays(*unnamed: object, chunk_size: int = 4096, **columns: torch.Tensor | np.ndarray | Sequence[Any]) -> DataSpec:
    """Describes tensors or arrays, one per column, with the records along their first dimension.

    They are stored with the job (`DataSpec.store`), and memory-mapped where they are read. Raises GraphftError when
    their lengths differ, one is not of numbers, or one has no name.
    """
    if unnamed:
        text = f"arrays() got {len(unnamed)} without a name: {', '.join(type(value).__name__ for value in unnamed)}"
        raise _columns(text, "name each column like an input of the program: graphft.arrays(x=..., y=...)")
    names = check_columns(columns)
    values = {name: _as_array(name, columns[name]) for name in names}
    lengths = {name: len(a) for name, a in values.items()}
    if len(set(lengths.values())) > 1:
        text = f"columns have different lengths: {', '.join(f'{k}: {v}' for k, v in lengths.items())}"
        raise GraphftError(text, rule="column-lengths", help="give every column one entry per record")
    records = lengths[names[0]]
    if records == 0:
        raise GraphftError("the columns have no records", rule="short-data", help="give at least one batch")
    types = {n: Type(torch_dtype(n, a.dtype), ("batch", *a.shape[1:])) for n, a in values.items()}
    chunks = tuple(ChunkInfo(i, n, start) for i, (start, n) in enumerate(split(records, chunk_size)))
    fingerprint = {n: array_digest(a) for n, a in values.items()}
    return DataSpec("arrays", types, chunks, {"fingerprint": fingerprint}, values)


def _as_array(name: str, value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, NotImplementedError, RuntimeError) as e:  # a dtype, meta, sparse
            raise _columns(f"column {name}: {e}", "give it as float32, and convert it in the model") from e
    if np.ma.is_masked(value):
        text = f"column {name} is a masked array, and {int(np.ma.count_masked(value))} of its elements are masked"
        raise _columns(text, "fill them (a.filled(0)), and give the mask as a column of its own")
    array = np.asarray(value)
    if array.ndim == 0:
        raise _columns(f"column {name} is a single value", "give one entry per record")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
