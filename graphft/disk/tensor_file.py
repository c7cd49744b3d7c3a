"""Tensors in safetensors' format, written and read piece by piece.

The format is a header (its length in 8 bytes, little-endian; JSON; padded with spaces to a multiple of 8 bytes), then
the tensors' bytes. The package writes the same bytes from one buffer that holds everything, and keeps the interpreter's
lock meanwhile: no other thread of the process runs, and memory is needed twice. Here a tensor's memory goes to the file
as it is, and each piece gives the lock up.

The metadata of what graphft writes has a checksum of each tensor, by its name, with its dtype and shape. It is checked
where graphft reads the file; to others it is metadata like any other.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from graphft.disk.block_deltas import block_digests, checksum_of
from graphft.disk.fileio import PIECE, open_regular, replacing
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
"""By it they are known where it is their name in which a bit was flipped."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, whole or not at all. Raises OSError.

    Tensors that share memory (tied weights, views) are each written whole. The same tensors give the same bytes.
    Memory is needed for one tensor at a time, and only where it is not contiguous in the processor's memory.
    """
    others = dict(metadata or {})
    found = {"": _checksum(others)} | {n: _checksum_of(n, t) for n, t in sorted(tensors.items())}
    header, order = lay_out(tensors, others | {CHECKSUMS: json.dumps(found, separators=(",", ":"))})
    with replacing(path) as file:
        file.write(header)
        for name in order:
            file.write(bytes_of(tensors[name]))


def pack_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file of them would hold, without checksums: for a message."""
    header, order = lay_out(tensors, metadata)
    return header + b"".join(bytes_of(tensors[name]) for name in order)


def unpack_tensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The inverse of `pack_tensors`. Raises GraphftError[tensor-file] for anything else."""
    return _read("a message", io.BytesIO(data), len(data))


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[str]]:
    """The header of a safetensors file, and the order of the tensors whose bytes follow it, one behind the other.

    Raises GraphftError[save] for a dtype that the format does not have.
    """
    order = sorted(tensors, key=lambda name: (_ORDER[_known(name, tensors[name])], name))
    return _header({name: tensors[name] for name in order}, metadata), order


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's elements as a file has them: its own memory where that is contiguous and the processor's."""
    return _bytes_of(tensor.detach().cpu().contiguous())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether they have one dtype, one shape, and the same bits: what is NaN in both is the same."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    plain = (tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in (one, other))
    return torch.equal(*map(_as_bytes, plain))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata.

    Raises OSError; GraphftError[tensor-file] for what is no whole safetensors file, and for one of ours in which
    anything is not what was written.
    """
    with open_regular(path, 0) as file:
        tensors, metadata = _read(path, file, os.fstat(file.fileno()).st_size)
    if CHECKSUMS in metadata or any(str(value).startswith(_BEGINNING) for value in metadata.values()):
        _check(path, tensors, metadata)
    return tensors, metadata


def _read(path: Path | str, file: BinaryIO, size: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`path`: for errors."""
    length = int.from_bytes(fill(file, bytearray(min(8, size))), "little")
    if length > size - 8:
        raise _damaged(path, f"its header has {length} bytes, the file {size}")
    layout, metadata = layout_of(path, bytes(fill(file, bytearray(length))), size - 8 - length)
    tensors = {}
    for name, (dtype, shape) in layout.items():
        tensors[name] = torch.empty(shape, dtype=dtype)
        fill(file, _bytes_of(tensors[name]))
    return tensors, metadata


def _check(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Takes the checksums out of the metadata."""
    try:
        written = dict(json.loads(metadata.pop(CHECKSUMS, "")))
    except ValueError as error:
        raise _damaged(path, f"its checksums are damaged ({error})") from error
    if written.pop("", "") != _checksum(metadata):
        raise _damaged(path, "its metadata is not what was written")
    for name in sorted(tensors.keys() | written.keys()):
        if name not in tensors or written.get(name) != _checksum_of(name, tensors[name]):
            raise _damaged(path, f"%{name} is not what was written")


def _checksum_of(name: str, tensor: Tensor) -> str:
    """Of its dtype and shape, and its elements."""
    described = f"{_NAMES[_known(name, tensor)]}{list(tensor.shape)}"
    return checksum_of(described.encode() + block_digests(bytes_of(tensor)))


def _checksum(metadata: Mapping[str, str]) -> str:
    return checksum_of(json.dumps(dict(sorted(metadata.items()))).encode())


def fill(file: BinaryIO, into: bytearray | memoryview) -> bytearray | memoryview:
    """Reads until it is full. What is missing at the end stays as it was."""
    view = memoryview(into)
    at = 0
    while at < view.nbytes and (count := file.readinto(view[at : at + PIECE])):  # type: ignore[attr-defined]
        at += count
    return into


def _known(name: str, tensor: Tensor) -> torch.dtype:
    if name == "__metadata__":
        raise GraphftError("no tensor can be saved as __metadata__", rule="save", help="that name is safetensors' own")
    if tensor.dtype not in _NAMES:
        raise GraphftError(
            f"%{name} cannot be saved: safetensors has no {tensor.dtype}",
            rule="save",
            help=f"it has {', '.join(str(dtype).removeprefix('torch.') for dtype in _NAMES)}",
        )
    return tensor.dtype


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """`tensors` in the order in which they are laid out."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def layout_of(
    path: Path | str, header: bytes, size: int
) -> tuple[dict[str, tuple[torch.dtype, list[int]]], dict[str, str]]:
    """What lies in the `size` bytes behind the header, in this order; and the metadata.

    Raises GraphftError[tensor-file] if that is not what the header says. `path`: for that.
    """
    try:
        entries = json.loads(header, object_pairs_hook=_once_each)
        metadata = dict(entries.pop("__metadata__", {}))
        found = sorted(
            (_index(start), _index(end), name, e["dtype"], [_index(n) for n in e["shape"]])
            for name, e in entries.items()
            for start, end in [e["data_offsets"]]
        )
        unknown = {dtype for *_, dtype, _ in found} - _DTYPES.keys()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, f"its header is damaged ({error!r})") from error
    if unknown:
        raise _damaged(path, f"there is no dtype {', '.join(sorted(unknown))}")
    at = 0
    for start, end, name, dtype, shape in found:
        if start != at or end - start != math.prod(shape) * _DTYPES[dtype].itemsize or min(shape, default=0) < 0:
            raise _damaged(path, f"%{name} does not lie where its header says")
        at = end
    if at != size:
        raise _damaged(path, f"expected {at} bytes of tensors, found {size}")
    return {name: (_DTYPES[dtype], shape) for _, _, name, dtype, shape in found}, metadata


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def _index(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, without a copy."""
    return _as_bytes(tensor).numpy().data


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))  # of one element, any stride is contiguous
    return flat.view(torch.uint8)


def _damaged(path: Path | str, what: str) -> GraphftError:
    return GraphftError(
        f"'{path}' is no whole safetensors file: {what}",
        rule="tensor-file",
        help="give a file that graphft or safetensors wrote",
    )
