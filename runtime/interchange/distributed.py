"""Directories of `torch.distributed.checkpoint`: their tensors, by name, in one process.

Their `.metadata` is a pickle. What reads it here (`distributed_metadata`) makes no object of any real class; what is
given to torch's own reader then is made anew, of fields that were checked. It reads tensors with `weights_only=True`,
and is not let near anything else.
"""

from __future__ import annotations

import os
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

from graphft.errors import GraphftError, UsageError, plain_text
from graphft.runtime.fs import LocalFS, file_system
from graphft.runtime.interchange.distributed_metadata import Described, read_description


class _Reader(dcp.FileSystemReader):
    """Of files whose metadata are known already."""

    def __init__(self, folder: Path, known: metadata.Metadata) -> None:
        super().__init__(folder)
        self._known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        return self._known


class _Planner(DefaultLoadPlanner):
    """For tensors only: anything else would be unpickled."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


def local_path(source: str | os.PathLike[str]) -> Path:
    """Returns the folder of such a directory. Raises UsageError if it is not on a local disk."""
    fs, path = file_system(os.fspath(source))
    if not isinstance(fs, LocalFS):
        raise UsageError(f"{source} can be read from a local disk only", rule="weights", help="copy the folder first")
    return Path(path)


def read_distributed(folder: Path, name: str = "model") -> dict[str, Tensor]:
    """The tensors below `name` of what was saved, without that name; all of them, where none has a name before it."""
    found = read_description(folder)
    paths = {n: t.path for n, t in found.items()}
    below = {n: ".".join(path[1:]) for n, path in paths.items() if len(path) > 1 and path[0] == name}
    if not below and any(len(path) > 1 for path in paths.values()):
        raise UsageError(
            f"{folder} has no {name!r}",
            rule="weights",
            help=f"name it (name=, --object): it has {', '.join(sorted({path[0] for path in paths.values()}))}",
        )
    wanted = below or {n: n for n in found}
    state = {n: torch.empty(found[n].shape, dtype=found[n].dtype) for n in wanted}
    try:
        _load(state, folder, {n: found[n] for n in wanted})
    except CheckpointException as error:  # a BaseException, with the traceback as its text
        raise GraphftError(
            f"{folder} cannot be read: {_causes(error)}",
            rule="weights",
            help="was the folder copied or downloaded wholly?",
        ) from None
    return {wanted[n]: value for n, value in state.items()}


def _causes(error: CheckpointException) -> str:
    return plain_text("; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()), 400)


def _load(state: dict[str, Tensor], folder: Path, described: Mapping[str, Described]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = _Reader(folder, _metadata_of(described))
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=True)


def _metadata_of(described: Mapping[str, Described]) -> metadata.Metadata:
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, tensor in described.items():
        chunks = [metadata.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        properties = metadata.TensorProperties(dtype=tensor.dtype)
        tensors[name] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, chunk in enumerate(tensor.chunks):
            index = metadata.MetadataIndex(name, torch.Size(chunk.offsets), number)
            places[index] = filesystem._StorageInfo(chunk.file, chunk.start, chunk.bytes)
    return metadata.Metadata(tensors, None, places, metadata.StorageMeta())


def write_distributed(
    folder: Path,
    tensors: Mapping[str, Tensor],
    name: str = "model",
    optimizer: Mapping[str, Any] | None = None,
    optimizer_name: str = "optimizer",
) -> None:
    """Writes `{name: tensors}` as one process of a distributed job would; with `optimizer`, what torch's
    `get_optimizer_state_dict` has of it as well. Raises UsageError if something is there, OSError."""
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", rule="export", help="give a new folder")
    state = {name: dict(tensors)} | ({optimizer_name: dict(optimizer)} if optimizer is not None else {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:  # a BaseException, with the traceback as its text
            raise OSError(_causes(error)) from None
