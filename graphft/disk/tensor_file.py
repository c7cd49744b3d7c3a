"""Tensors in safetensors' format, each with a checksum, written and read piece by piece.

The package writes the same bytes from one buffer that holds everything, and keeps the interpreter's lock meanwhile.
Here a tensor's memory goes to the file as it is, and each piece gives the lock up.

The metadata has a checksum of each tensor, by its name, with its dtype and shape. It is checked where graphft reads the
file; to others it is metadata like any other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
import xxhash
from torch import Tensor

from graphft.disk.fileio import PIECE, Writer, replacing
from graphft.errors import GraphftError

_DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""In the order in which safetensors lays tensors out, so that each lies at a multiple of its element's size."""
TENSOR_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
"""Those that the format has, by their names in torch."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}
CHECKSUMS = "checksums"
"""In the metadata: JSON, {tensor: checksum}; that of the rest of the metadata under "", which comes first."""
_BEGINNING = '{"":"'
"""Tells checksums whose name in the metadata is damaged."""


@dataclass(frozen=True)
class TensorFile:
    """A file that is to be written. `checksum`: of its header, and so of all that is in it."""

    header: bytes
    tensors: list[Tensor]

    @property
    def bytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors)

    @property
    def checksum(self) -> str:
        return checksum_of(self.header)

    def write(self, file: Writer) -> None:
        file.write(self.header)
        for tensor in self.tensors:
            file.write(bytes_of(tensor))


@dataclass(frozen=True)
class Header:
    """The header of a file that is read. `layout` is in the order of the bytes; a file that others wrote has no
    `checksums`."""

    layout: dict[str, tuple[torch.dtype, list[int]]]
    metadata: dict[str, str]
    checksums: dict[str, str] | None


# -- writing ----------------------------------------------------------------------------------------------------------


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> TensorFile:
    """Lays a file out. Reads every byte of the tensors, for the checksums; equal tensors give equal bytes.

    Tensors that share memory (tied weights, views) are each written whole. Raises GraphftError[save] for a dtype that
    the format does not have.
    """
    others = dict(metadata or {})
    found = {"": _checksum(others)} | {n: _checksum_of(n, t) for n, t in sorted(tensors.items())}
    others |= {CHECKSUMS: json.dumps(found, separators=(",", ":"))}
    order = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    entries: dict[str, Any] = {"__metadata__": others}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return TensorFile(len(text).to_bytes(8, "little") + text, [tensors[name] for name in order])


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, whole or not at all. Raises OSError, and GraphftError as `tensor_file`."""
    made = tensor_file(tensors, metadata)
    with replacing(path) as file:
        made.write(file)


def _known(name: str, tensor: Tensor) -> torch.dtype:
    if name == "__metadata__":
        raise GraphftError("no tensor can be saved as __metadata__", rule="save", help="that name is safetensors' own")
    if tensor.dtype not in _NAMES:
        raise GraphftError(
            f"%{name} cannot be saved: safetensors has no {tensor.dtype}",
            rule="save",
            help=f"it has {', '.join(TENSOR_DTYPES)}",
        )
    return tensor.dtype


def _checksum_of(name: str, tensor: Tensor) -> str:
    described = f"{_NAMES[_known(name, tensor)]}{list(tensor.shape)}"
    return checksum_of(bytes_of(tensor), described.encode())


def _checksum(metadata: Mapping[str, str]) -> str:
    return checksum_of(json.dumps(dict(sorted(metadata.items()))).encode())


# -- reading ----------------------------------------------------------------------------------------------------------


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of a safetensors file, and its metadata.

    Raises OSError; GraphftError[tensor-file] for what is no whole safetensors file, and for one of ours in which
    anything is not what was written.
    """
    with path.open("rb", 0) as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, path)
        return dict(each_tensor(file, header, path)), header.metadata


def read_header(file: BinaryIO, size: int, path: Path | str, checksum: str = "") -> Header:
    """Reads the header of a file of `size` bytes, whose `checksum` may be known. `path`: for errors.

    Raises GraphftError[tensor-file] if it is not what was written, or does not say what lies in so many bytes.
    """
    beginning = bytes(_fill(file, bytearray(min(8, size))))
    length = int.from_bytes(beginning, "little")
    if length > size - 8:
        raise _damaged(path, f"its header has {length} bytes, the file {size}")
    text = bytes(_fill(file, bytearray(length)))
    if checksum and checksum_of(beginning + text) != checksum:
        raise _damaged(path, "its header is not what was written")
    layout, metadata = _layout_of(path, text, size - 8 - length)
    if CHECKSUMS not in metadata and not any(str(value).startswith(_BEGINNING) for value in metadata.values()):
        return Header(layout, metadata, None)
    try:
        checksums = dict(json.loads(metadata.pop(CHECKSUMS, "")))
    except ValueError as error:
        raise _damaged(path, f"its checksums are damaged ({error})") from error
    if checksums.pop("", "") != _checksum(metadata):
        raise _damaged(path, "its metadata is not what was written")
    if wrong := sorted(checksums.keys() ^ layout.keys()):
        raise _damaged(path, f"%{wrong[0]} is not what was written")
    return Header(layout, metadata, checksums)


def each_tensor(file: BinaryIO, header: Header, path: Path | str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that follow the header, each checked. Raises as `read_header`."""
    for name, (dtype, shape) in header.layout.items():
        tensor = torch.empty(shape, dtype=dtype)
        _fill(file, bytes_of(tensor))
        if header.checksums is not None and header.checksums[name] != _checksum_of(name, tensor):
            raise _damaged(path, f"%{name} is not what was written")
        yield name, tensor


def _fill(file: BinaryIO, into: bytearray | memoryview) -> bytearray | memoryview:
    """Reads until it is full. What is missing at the end stays as it was."""
    view = memoryview(into)
    at = 0
    while at < view.nbytes and (count := file.readinto(view[at : at + PIECE])):  # type: ignore[attr-defined]
        at += count
    return into


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _layout_of(
    path: Path | str, header: bytes, size: int
) -> tuple[dict[str, tuple[torch.dtype, list[int]]], dict[str, str]]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(text, type=_Entry) for name, text in raw.items()}
        order = sorted(entries.items(), key=lambda item: (item[1].data_offsets, item[0]))
        layout = {name: (_DTYPES[entry.dtype], entry.shape) for name, entry in order}
    except (msgspec.DecodeError, ValueError, KeyError, RecursionError) as error:
        raise _damaged(path, f"its header is damaged ({error!r})") from error
    at = 0
    for name, (dtype, shape) in layout.items():
        start, end = entries[name].data_offsets
        if start != at or end - start != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
            raise _damaged(path, f"%{name} does not lie where its header says")
        at = end
    if at != size:
        raise _damaged(path, f"expected {at} bytes of tensors, found {size}")
    return layout, metadata


# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns a tensor's elements as a file has them: its own memory where that is contiguous and the processor's."""
    return _as_bytes(tensor.detach().cpu().contiguous()).numpy().data


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if they have one dtype, one shape, and the same bits: what is NaN in both is the same."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    plain = (tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in (one, other))
    return torch.equal(*map(_as_bytes, plain))


def checksum_of(data: bytes | memoryview, beginning: bytes = b"") -> str:
    """Returns the xxh3 checksum (128 bits), taken piece by piece: xxhash gives the interpreter's lock up for each."""
    found = xxhash.xxh3_128(beginning)
    for at in range(0, len(data), PIECE):
        found.update(data[at : at + PIECE])
    return found.hexdigest()


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))  # of one element, any stride is contiguous
    return flat.view(torch.uint8)


def _damaged(path: Path | str, what: str) -> GraphftError:
    return GraphftError(
        f"{path} is no whole safetensors file: {what}",
        rule="tensor-file",
        help="give a file that graphft or safetensors wrote",
    )
