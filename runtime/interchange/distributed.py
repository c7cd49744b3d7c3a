"""Directories of `torch.distributed.checkpoint`: their tensors, by name, in one process.

Their `.metadata` is a pickle. What reads it here makes the few classes of which such a file consists, and nothing else;
tensors are read by torch's own reader, with `weights_only=True`.
"""

from __future__ import annotations

import functools
import pathlib
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
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from graphft.errors import GraphftError, UsageError, plain_text

METADATA = ".metadata"
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)


class _Unpickler(pickle.Unpickler):
    """Makes what a `.metadata` consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == metadata.__name__ and name in _CLASSES:
            return getattr(metadata, name)
        if module == filesystem.__name__ and name == "_StorageInfo":
            return filesystem._StorageInfo
        if (module, name) == ("torch", "Size") or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return pathlib.PurePath
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"it makes a {module}.{name}")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"it makes a {name}")
    return found


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return _read_metadata(Path(self.path))


@functools.lru_cache(maxsize=1)
def _read_metadata(folder: Path) -> Metadata:
    try:
        with (folder / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
    except (
        OSError,
        pickle.UnpicklingError,
        AttributeError,
        TypeError,
        ValueError,
        EOFError,
        IndexError,
        KeyError,
    ) as error:
        raise GraphftError(
            f"{folder / METADATA} is not what torch.distributed.checkpoint writes: {error}",
            rule="weights",
            help="give the folder that torch.distributed.checkpoint.save wrote",
        ) from error
    if not isinstance(found, Metadata):
        raise GraphftError(f"{folder / METADATA} holds no Metadata", rule="weights", help="give another folder")
    return found


def read_distributed(folder: Path, name: str = "model") -> dict[str, Tensor]:
    """The tensors below `name` of what was saved, without that name; all of them, where nothing is called so."""
    _read_metadata.cache_clear()
    found = _read_metadata(folder)
    tensors = {n: m for n, m in found.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
    paths = dict(found.planner_data or {}) if isinstance(found.planner_data, Mapping) else {}
    below = {
        n: ".".join(map(str, paths[n][1:])) for n in tensors if n in paths and len(paths[n]) > 1 and paths[n][0] == name
    }
    wanted = below or {n: n for n in tensors}
    state = {n: torch.empty(tensors[n].size, dtype=tensors[n].properties.dtype) for n in wanted}
    try:
        _load(state, folder)
    except CheckpointException as error:  # a BaseException, with the traceback as its text
        causes = [f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()]
        raise GraphftError(
            f"{folder} cannot be read: {plain_text('; '.join(causes), 400)}",
            rule="weights",
            help="was the folder copied or downloaded wholly?",
        ) from None
    return {wanted[n]: value for n, value in state.items()}


def _load(state: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=_Reader(folder), no_dist=True)


def write_distributed(folder: Path, tensors: Mapping[str, Tensor], name: str = "model") -> None:
    """Writes `{name: tensors}` as one process of a distributed job would. Raises UsageError if something is there."""
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", rule="export", help="give a new folder")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({name: dict(tensors)}, checkpoint_id=folder, no_dist=True)
