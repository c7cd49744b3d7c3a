"""Directories of `torch.distributed.checkpoint`: their tensors, by name, in one process.

Their `.metadata` is a pickle. Every class that it names becomes an inert one here, which keeps what it is given and
does nothing; of these objects, the fields that are needed are given to torch's own reader, which reads tensors with
`weights_only=True`, and is not let near anything else.
"""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from graphft.disk.tensor_file import TENSOR_DTYPES
from graphft.errors import GraphftError, UsageError, plain_text
from graphft.runtime.fs import LocalFS, file_system

METADATA = ".metadata"
Paths = dict[str, tuple[str, ...]]
"""By a tensor's name, under which names it was saved, one inside the other."""


def local_path(source: str | os.PathLike[str]) -> Path:
    """Returns the folder of such a directory. Raises UsageError if it is not on a local disk."""
    fs, path = file_system(os.fspath(source))
    if not isinstance(fs, LocalFS):
        raise UsageError(f"{source} can be read from a local disk only", rule="weights", help="copy the folder first")
    return Path(path)


def read_distributed(folder: Path, name: str = "model") -> dict[str, Tensor]:
    """Returns the tensors below `name` of what was saved, without that name; all of them, where none has a name before
    it. Raises GraphftError[weights]."""
    try:
        with (folder / METADATA).open("rb") as file:
            known, paths = _checked(_Unpickler(file).load().state)
    except Exception as error:  # of whatever a pickle may hold
        text = f"{folder / METADATA} is not what torch.distributed.checkpoint writes: {error!r}"
        raise GraphftError(text, rule="weights", help="give the folder that its save() wrote") from error
    below = {n: ".".join(path[1:]) for n, path in paths.items() if len(path) > 1 and path[0] == name}
    if not below and any(len(path) > 1 for path in paths.values()):
        help = f"name it (name=, --object): it has {', '.join(sorted({path[0] for path in paths.values()}))}"
        raise UsageError(f"{folder} has no {name!r}", rule="weights", help=help)
    wanted = below or {n: n for n in paths}
    found = {n: known.state_dict_metadata[n] for n in wanted}
    state = {n: torch.empty(t.size, dtype=t.properties.dtype) for n, t in found.items()}  # type: ignore[union-attr]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=_Reader(folder, known), planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # a BaseException, with the traceback as its text
        help = "was the folder copied or downloaded wholly?"
        raise GraphftError(f"{folder} cannot be read: {_causes(error)}", rule="weights", help=help) from None
    return {wanted[n]: value for n, value in state.items()}


class _Inert:
    """An object of a class that a pickle names: what it was made of."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {})


def _checked(fields: Mapping[str, Any]) -> tuple[metadata.Metadata, Paths]:
    """Returns the tensors that are described. Raises any Exception for what is not as torch writes it."""
    tensors: dict[str, Any] = {}
    for name, value in fields["state_dict_metadata"].items():
        if type(value).__name__ != "TensorStorageMetadata" or type(name) is not str:
            continue  # what is no tensor is not read
        size, dtype = _size(value.state["size"]), TENSOR_DTYPES[value.state["properties"].state[0].__name__]
        chunks = [
            metadata.ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
            for chunk in value.state["chunks"]
        ]
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
            raise ValueError(f"the parts of {name} are not the whole of it")
        tensors[name] = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=dtype), size, chunks)
    places: dict[Any, Any] = {}
    for key, value in fields["storage_data"].items():
        index, place = key.state, value.state
        if index["fqn"] in tensors:
            file = place["relative_path"]
            if Path(file).name != file:
                raise ValueError(f"it names the file {file!r}")
            at = metadata.MetadataIndex(index["fqn"], _size(index["offset"]), index["index"])
            places[at] = filesystem._StorageInfo(file, place["offset"], place["length"])
    paths = {name: tuple(map(str, (fields.get("planner_data") or {}).get(name, (name,)))) for name in tensors}
    return metadata.Metadata(tensors, None, places, metadata.StorageMeta()), paths


def _size(value: _Inert) -> torch.Size:
    (numbers,) = value.args
    if min(numbers, default=0) < 0:
        raise ValueError(f"a size is {numbers}")
    return torch.Size(numbers)


class _Reader(dcp.FileSystemReader):
    """Reads files whose metadata are known already."""

    def __init__(self, folder: Path, known: metadata.Metadata) -> None:
        super().__init__(folder)
        self._known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._known


class _Planner(DefaultLoadPlanner):
    """Loads tensors only: anything else would be unpickled."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


def write_distributed(folder: Path, tensors: Mapping[str, Tensor], name: str = "model") -> None:
    """Writes `{name: tensors}` as one process of a distributed job would. Raises OSError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save({name: dict(tensors)}, checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:  # a BaseException, with the traceback as its text
            raise OSError(_causes(error)) from None


def _causes(error: CheckpointException) -> str:
    return plain_text("; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()), 400)
