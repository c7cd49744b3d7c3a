"""The `.metadata` of `torch.distributed.checkpoint`, read without trust.

It is a pickle. Every class that it names becomes a class of its own here, made for this one reading, whose objects keep
what they are given and do nothing; so a file can neither call anything nor change what the process has. Of these
objects the fields that are needed are taken, each checked.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphft.disk.tensor_file import TENSOR_DTYPES
from graphft.errors import GraphftError

METADATA = ".metadata"
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_KNOWN = {
    _METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    _FILES: {"_StorageInfo"},
    "torch": {"Size", *TENSOR_DTYPES},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


@dataclass(frozen=True)
class Piece:
    """A block of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    bytes: int


@dataclass(frozen=True)
class Described:
    """A tensor. `path`: under which names it was saved, one inside the other."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Piece, ...]


class _Thing:
    """An object of a class that the file names: what it was made of."""

    kind = ""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None
        self.entries: dict[Any, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries[key] = value


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._classes: dict[str, type[_Thing]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()) and not (module.startswith("pathlib") and name in _PATHS):
            raise pickle.UnpicklingError(f"it makes a {module}.{name}")
        kind = f"{module}.{name}"
        return self._classes.setdefault(kind, type("_Named", (_Thing,), {"kind": kind}))


class _WrongError(Exception):
    """A field is not what it should be."""


def read_description(folder: Path) -> dict[str, Described]:
    """The tensors of a directory, by their flat names. Raises GraphftError[weights]."""
    try:
        with (folder / METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        return dict(_tensors(folder, _fields(found, f"{_METADATA}.Metadata")))
    except Exception as error:  # of whatever a pickle may hold
        raise GraphftError(
            f"{folder / METADATA} is not what torch.distributed.checkpoint writes: {error}",
            rule="weights",
            help="give the folder that torch.distributed.checkpoint.save wrote",
        ) from error


def _tensors(folder: Path, fields: Mapping[str, Any]) -> Iterator[tuple[str, Described]]:
    paths = _mapping(fields.get("planner_data") or {})
    places = _places(folder, fields)
    there = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
    for name, value in _mapping(fields["state_dict_metadata"]).items():
        if type(name) is not str:
            raise _WrongError(f"{name!r} is no name")
        if not isinstance(value, _Thing) or value.kind != f"{_METADATA}.TensorStorageMetadata":
            continue  # what is no tensor is not read
        own = _fields(value, value.kind)
        shape, dtype = _numbers(own["size"]), _dtype(own["properties"])
        if math.prod(shape) * dtype.itemsize > there:
            raise _WrongError(f"{name} is to have {math.prod(shape)} elements; all files have {there} bytes")
        chunks = tuple(_piece(name, chunk, places) for chunk in _list(own["chunks"]))
        _check_cover(name, shape, chunks)
        path = paths.get(name, (name,))
        if not isinstance(path, tuple) or not all(type(part) in (str, int) for part in path) or not path:
            raise _WrongError(f"{name} has the path {path!r}")
        yield name, Described(tuple(map(str, path)), shape, dtype, chunks)


def _places(folder: Path, fields: Mapping[str, Any]) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """By name and offsets of a piece: file, start and length."""
    found = {}
    for key, value in _mapping(fields["storage_data"]).items():
        index, place = _fields(key, f"{_METADATA}.MetadataIndex"), _fields(value, f"{_FILES}._StorageInfo")
        if index.get("offset") is None:
            continue  # no tensor
        file, start, length = place["relative_path"], place["offset"], place["length"]
        if type(file) is not str or Path(file).name != file or not (folder / file).is_file():
            raise _WrongError(f"it names the file {file!r}, which is not in the folder")
        if place.get("transform_descriptors"):
            raise _WrongError(f"{file} is compressed or encrypted, which graphft does not read")
        if type(start) is not int or type(length) is not int or start < 0 or length < 0:
            raise _WrongError(f"it has {start!r} and {length!r} for places in {file}")
        found[str(index["fqn"]), _numbers(index["offset"])] = file, start, length
    return found


def _piece(name: str, chunk: Any, places: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]]) -> Piece:
    own = _fields(chunk, f"{_METADATA}.ChunkStorageMetadata")
    offsets, sizes = _numbers(own["offsets"]), _numbers(own["sizes"])
    if (name, offsets) not in places:
        raise _WrongError(f"it does not say where the part of {name} at {offsets} is")
    return Piece(offsets, sizes, *places[name, offsets])


def _check_cover(name: str, shape: tuple[int, ...], chunks: tuple[Piece, ...]) -> None:
    """Every element is in one piece."""
    for c in chunks:
        if len(c.offsets) != len(shape) or len(c.sizes) != len(shape):
            raise _WrongError(f"a part of {name} has other dimensions")
        if any(start + size > whole for start, size, whole in zip(c.offsets, c.sizes, shape, strict=True)):
            raise _WrongError(f"a part of {name} lies outside of it")
    covered = sum(math.prod(c.sizes) for c in chunks)
    if covered != math.prod(shape) or any(_overlap(a, b) for a, b in itertools.combinations(chunks, 2)):
        raise _WrongError(f"the parts of {name} have {covered} elements, some perhaps twice, of {math.prod(shape)}")


def _overlap(a: Piece, b: Piece) -> bool:
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(x < y + n and y < x + m for x, m, y, n in spans)


def _fields(thing: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(thing, _Thing) or thing.kind != kind or not isinstance(thing.state, dict):
        raise _WrongError(f"expected a {kind}, found {getattr(thing, 'kind', '') or type(thing).__name__}")
    return thing.state


def _mapping(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, _Thing) and value.kind == "collections.OrderedDict":
        return dict(value.entries)
    if not isinstance(value, dict):
        raise _WrongError(f"expected a dict, found a {type(value).__name__}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _WrongError(f"expected a list, found a {type(value).__name__}")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Of a torch.Size."""
    if isinstance(value, _Thing) and value.kind == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and n >= 0 for n in value):
        raise _WrongError(f"expected sizes, found {value!r:.80}")
    return tuple(value)


def _dtype(properties: Any) -> torch.dtype:
    """The first thing that the state of TensorProperties has."""
    if not isinstance(properties, _Thing) or properties.kind != f"{_METADATA}.TensorProperties":
        raise _WrongError("a tensor has no properties")
    state = properties.state
    found = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    kind = getattr(found, "kind", "")
    if not kind.startswith("torch.") or kind.removeprefix("torch.") not in TENSOR_DTYPES:
        raise _WrongError(f"there is no dtype {kind or found!r}")
    return TENSOR_DTYPES[kind.removeprefix("torch.")]
