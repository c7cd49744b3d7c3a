"""Safetensors files in which every flipped bit is found, and that need not repeat what an earlier file has.

The header's metadata has a checksum of each tensor; whoever keeps a file's entry (a manifest) has the checksum of the
header. So a tensor is checked as it is read, alone or with the others.

A tensor is compared block by block (64 KB) with what the file before had. What did not change is not written again:
the metadata then says of which pieces the tensor consists, and in which files they lie. They are named where their
bytes are, never by way of another such file, and there are at most MAX_FILES of them: a chain does not grow. A file
that needs no other is a plain safetensors file to everyone.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol

import msgspec
import torch
from torch import Tensor

from graphft.disk.block_deltas import (
    Base,
    FileEntry,
    Known,
    Piece,
    Runs,
    block_digests,
    changed_runs,
    checksum_of,
    pieces_of,
    without_small_shares,
    worth_it,
)
from graphft.disk.fileio import PIECE
from graphft.disk.tensor_file import TENSOR_DTYPES, bytes_of, fill, lay_out, layout_of
from graphft.errors import GraphftError

META = "graphft"


class _Written(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor in the metadata. With `pieces`, what lies under its name in the file is a part of it, or nothing."""

    checksum: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()


class _Meta(msgspec.Struct, frozen=True):
    tensors: dict[str, _Written]
    note: str = ""


class Writer(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True)
class CheckedFile:
    """A file that is to be written under `name`. `base`: what one after it may refer to."""

    name: str
    header: bytes
    entry: FileEntry
    base: Base
    _parts: list[tuple[Tensor, Runs]]

    def write(self, file: Writer) -> None:
        file.write(self.header)
        for tensor, runs in self._parts:
            data = bytes_of(tensor)
            for start, end in runs:
                for at in range(start, end, PIECE):
                    file.write(data[at : min(at + PIECE, end)])


@dataclass(frozen=True)
class Contents:
    """What was read. `base`: what a file that is written next may refer to."""

    tensors: dict[str, Tensor]
    note: str
    base: Base


# -- writing ----------------------------------------------------------------------------------------------------------


def checked_file(tensors: Mapping[str, Tensor], name: str, note: str = "", base: Base | None = None) -> CheckedFile:
    """Plans a file that will be called `name`. Reads every byte of the tensors once, for the checksums.

    Raises GraphftError[save] for a dtype that safetensors does not have.
    """
    digests = {n: block_digests(bytes_of(t)) for n, t in tensors.items()}
    if base is not None:
        runs = {n: changed_runs(t, digests[n], base.tensors.get(n)) for n, t in tensors.items()}
        runs = without_small_shares(tensors, runs, base)
        if worth_it(tensors, runs):
            return _plan(tensors, name, note, digests, runs, base)
    return _plan(tensors, name, note, digests, {n: [(0, t.nbytes)] for n, t in tensors.items()}, Base())


def _plan(
    tensors: Mapping[str, Tensor],
    name: str,
    note: str,
    digests: Mapping[str, bytes],
    runs: Mapping[str, Runs],
    base: Base,
) -> CheckedFile:
    """`runs`: what of each tensor is to be written; `base` has the rest."""
    own = {n: sum(end - start for start, end in runs[n]) for n in tensors}
    whole = {n for n, t in tensors.items() if own[n] == t.nbytes}
    parts = {n: torch.empty(count, dtype=torch.uint8, device="meta") for n, count in own.items() if count}
    there = parts | {n: tensors[n] for n in whole}
    order, places, at = lay_out(there)[1], dict.fromkeys(tensors, 0), 0
    for n in order:
        places[n], at = at, at + own[n]
    found = {
        n: Known(
            _name_of(t.dtype),
            tuple(t.shape),
            checksum_of(digests[n]),
            pieces_of(runs[n], places[n], None if n in whole else base.tensors[n], t.nbytes),
            digests[n],
        )
        for n, t in tensors.items()
    }
    written = {
        n: _Written(k.checksum) if n in whole else _Written(k.checksum, k.dtype, k.shape, k.pieces)
        for n, k in sorted(found.items())
    }
    header, order = lay_out(there, {META: msgspec.json.encode(_Meta(written, note)).decode()})
    needs = {p.file: base.files[p.file] for k in found.values() for p in k.pieces if p.file}
    entry = FileEntry(len(header) + at, len(header), checksum_of(header), dict(sorted(needs.items())))
    return CheckedFile(name, header, entry, _base(name, entry, found), [(tensors[n], runs[n]) for n in order])


def _base(name: str, entry: FileEntry, found: Mapping[str, Known]) -> Base:
    """`found`: as the file has them, whose name is not in it."""
    known = {n: replace(k, pieces=tuple(p.located(name, entry.header) for p in k.pieces)) for n, k in found.items()}
    return Base(known, {**entry.needs, name: entry.bytes})


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- reading ----------------------------------------------------------------------------------------------------------


def read_checked(
    open_file: Callable[[str], BinaryIO],
    name: str,
    entry: FileEntry,
    wanted: Callable[[str], bool] = lambda name: True,
    told: Callable[[int], object] = id,
) -> Contents:
    """The tensors that are wanted. `open_file`: by name; `told` gets the bytes of each tensor that is good.

    Raises OSError, and GraphftError[tensor-file] for what is not what was written.
    """
    tensors, known = {}, {}
    with opened(open_file) as files:
        found, note = _described(files(name), name, entry)
        for n in filter(wanted, found.tensors):
            tensors[n], known[n] = _read_tensor(files, n, name, found.tensors[n])
            told(tensors[n].nbytes)
    return Contents(tensors, note, replace(found, tensors=known))


def verify_checked(
    open_file: Callable[[str], BinaryIO], name: str, entry: FileEntry, told: Callable[[int], object] = id
) -> None:
    """As `read_checked`, of all tensors, and keeps none."""
    with opened(open_file) as files:
        found, _ = _described(files(name), name, entry)
        for n, known in found.tensors.items():
            told(_read_tensor(files, n, name, known)[0].nbytes)


@contextlib.contextmanager
def opened(open_file: Callable[[str], BinaryIO]) -> Iterator[Callable[[str], BinaryIO]]:
    """By name, files that are opened once, and closed at the end."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda name: stack.enter_context(contextlib.closing(open_file(name))))


def read_header(open_file: Callable[[str], BinaryIO], name: str, entry: FileEntry) -> tuple[Mapping[str, Known], str]:
    """Returns what a file's header says of its tensors, and its note. Raises as `read_checked`."""
    with contextlib.closing(open_file(name)) as file:
        found, note = _described(file, name, entry)
        return found.tensors, note


def _described(file: BinaryIO, name: str, entry: FileEntry) -> tuple[Base, str]:
    """What the header says, in the order in which the tensors lie there, and the note."""
    header = bytes(fill(file, bytearray(entry.header)))
    if checksum_of(header) != entry.checksum:
        raise damaged(name, "its header is not what was written")
    try:  # what follows was written so
        meta = msgspec.json.decode(json.loads(header[8:])["__metadata__"][META], type=_Meta)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(name, f"its header does not say what its tensors are ({error!r})") from error
    found, at = {}, 0
    for n, (dtype, shape) in layout_of(name, header[8:], entry.bytes - entry.header)[0].items():
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        w = meta.tensors[n]
        found[n] = Known(_name_of(dtype), tuple(shape), w.checksum, (Piece("", at, size),))
        at += size
    found |= {n: Known(w.dtype, w.shape, w.checksum, w.pieces) for n, w in meta.tensors.items() if w.pieces}
    return _base(name, entry, found), meta.note


def _read_tensor(opened: Callable[[str], BinaryIO], tensor: str, name: str, known: Known) -> tuple[Tensor, Known]:
    value = torch.empty(known.shape, dtype=TENSOR_DTYPES[known.dtype])
    data, at = bytes_of(value), 0  # what a file lacks shows in the checksum
    for piece in known.pieces:
        file = opened(piece.file)
        if file.tell() != piece.offset:
            file.seek(piece.offset)
        fill(file, data[at : at + piece.bytes])
        at += piece.bytes
    digests = block_digests(data)
    if at != data.nbytes or checksum_of(digests) != known.checksum:
        others = sorted({p.file for p in known.pieces} - {name})
        where = f", some of it in {', '.join(others)}" if others else ""
        raise damaged(name, f"%{tensor} is not what was written{where}")
    return value, replace(known, digests=digests)


def damaged(name: str, what: str) -> GraphftError:
    return GraphftError(f"{name} is damaged: {what}", rule="tensor-file", help="use an older one, or a copy")
