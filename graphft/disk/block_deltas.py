"""Of which blocks a tensor's bytes have changed, and where those that have not are written already."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import xxhash

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64 << 10
YIELD = 32 * BLOCK
DIGEST = 16
"""Bytes of a block's checksum (xxh3, 128 bits)."""
MAX_FILES, MAX_PIECES = 8, 4096
"""So many other files may be needed for one, and so many pieces for a tensor."""
LEAST_SAVED, LEAST_SHARE = 1 << 20, 0.1
"""A file refers to others if that saves so many bytes, and such a share of its own; and to one of which it needs such a
share: that file must be kept for it."""
Runs = list[tuple[int, int]]
"""Bytes of a tensor, from and to, in order; neighbours are put together."""


class Piece(NamedTuple):
    """Bytes of a tensor that lie one behind the other. `file` "": the file itself; `offset`: there behind its header,
    else from the other file's beginning."""

    file: str
    offset: int
    bytes: int

    def located(self, file: str, header: int) -> Piece:
        """With the name of its file, and from there on where that begins."""
        return self if self.file else Piece(file, header + self.offset, self.bytes)


class FileEntry(msgspec.Struct, frozen=True):
    """What must be known to check a file. `checksum`: of its header, `header` bytes. `needs`: other files, and their
    sizes."""

    bytes: int
    header: int
    checksum: str
    needs: dict[str, int] = {}


@dataclass(frozen=True)
class Known:
    """A tensor as it lies on the disk, in `pieces` by file name. `digests` of its blocks, one behind the other; empty:
    only `checksum`, that of all, is known."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str
    pieces: tuple[Piece, ...]
    digests: bytes = b""


@dataclass(frozen=True)
class Base:
    """What the next file may refer to: tensors, and the sizes of the files that they lie in."""

    tensors: Mapping[str, Known] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def changed_runs(tensor: Tensor, digests: bytes, known: Known | None) -> Runs:
    """Where it differs from what is known: in bytes, from and to; neighbours are put together."""
    size, dtype = tensor.nbytes, str(tensor.dtype).removeprefix("torch.")
    if known is None or (known.dtype, known.shape) != (dtype, tuple(tensor.shape)):
        return [(0, size)]
    if checksum_of(digests) == known.checksum:
        return []
    if len(digests) != len(known.digests):
        return [(0, size)]
    places = [slice(at, at + DIGEST) for at in range(0, len(digests), DIGEST)]
    blocks = [number for number, place in enumerate(places) if digests[place] != known.digests[place]]
    runs = _joined([(number * BLOCK, min((number + 1) * BLOCK, size)) for number in blocks])
    return _at_most(max(1, (MAX_PIECES - len(known.pieces)) // 2), runs)


def _at_most(count: int, runs: Runs) -> Runs:
    """So many runs, which have what lies between them where that is least: each run costs the header two pieces."""
    if len(runs) <= count:
        return runs
    gaps = sorted(range(1, len(runs)), key=lambda i: runs[i - 1][1] - runs[i][0])[: count - 1]
    starts = [0, *sorted(gaps)]
    ends = [*starts[1:], len(runs)]
    return [(runs[first][0], runs[end - 1][1]) for first, end in zip(starts, ends, strict=True)]


def without_small_shares(tensors: Mapping[str, Tensor], runs: Mapping[str, Runs], base: Base) -> dict[str, Runs]:
    """`runs`, and what lies in files of which little is needed, or in too many: these need not be kept for it."""
    found = {
        n: list(kept(runs[n], base.tensors[n].pieces, t.nbytes) if n in base.tensors else ())
        for n, t in tensors.items()
        if runs[n] != [(0, t.nbytes)]
    }
    used: Counter[str] = Counter()
    for each in found.values():
        for _, piece in each:
            used[piece.file] += piece.bytes
    worth = [f for f, count in used.most_common() if count >= LEAST_SHARE * base.files[f]][:MAX_FILES]
    more = {n: [(at, at + p.bytes) for at, p in each if p.file not in worth] for n, each in found.items()}
    return {n: _joined([*runs[n], *more.get(n, [])]) for n in tensors}


def _joined(runs: Runs) -> Runs:
    found: Runs = []
    for start, end in sorted(runs):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def worth_it(tensors: Mapping[str, Tensor], runs: Mapping[str, Runs]) -> bool:
    total = sum(t.nbytes for t in tensors.values())
    saved = total - sum(end - start for each in runs.values() for start, end in each)
    return saved > 0 and saved >= LEAST_SAVED and saved >= LEAST_SHARE * total


def pieces_of(runs: Runs, at: int, known: Known | None, size: int) -> tuple[Piece, ...]:
    """A tensor's bytes from its first to its last: those of `runs` lie in the file from `at` on, the others where they
    were."""
    if known is None:
        return (Piece("", at, size),) if size else ()
    found = list(kept(runs, known.pieces, size))
    for start, end in runs:
        found.append((start, Piece("", at, end - start)))
        at += end - start
    return tuple(piece for _, piece in sorted(found))


def kept(runs: Runs, pieces: tuple[Piece, ...], size: int) -> Iterator[tuple[int, Piece]]:
    """What of the pieces is in none of `runs`, and from where on in the tensor."""
    left = iter([*runs, (size, size)])
    start, end = next(left)
    at = 0
    for piece in pieces:
        first, last = at, at + piece.bytes
        while first < last:
            if first < start:
                until = min(start, last)
                yield first, Piece(piece.file, piece.offset + first - at, until - first)
                first = until
            elif first < end:
                first = end
            else:
                start, end = next(left)
        at = last


def block_digests(data: memoryview) -> bytes:
    """xxhash keeps the interpreter's lock for a block; without a pause, others would wait for it 5 ms each time."""
    found, digest = bytearray(), xxhash.xxh3_128_digest
    for start in range(0, data.nbytes, YIELD):
        end = min(start + YIELD, data.nbytes)
        found += b"".join([digest(data[at : min(at + BLOCK, end)]) for at in range(start, end, BLOCK)])
        if end < data.nbytes:
            time.sleep(0)
    return bytes(found)


def checksum_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
