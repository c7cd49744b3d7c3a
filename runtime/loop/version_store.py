"""Numbered checkpoints in a folder of any file system: each is there wholly, or not at all.

    <root>/checkpoint-00000012/tensors-<token>.safetensors     written first, under a name that no other process has
                               manifest.json                    last, made only if there is none: the commit

The manifest has the size and layout of the file, a checksum of its header and of each tensor, and what is no tensor. It
is written in one canonical form, with a checksum of its own, so that every flipped bit of either file is found.
"""

from __future__ import annotations

import json
import posixpath
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from graphft.errors import GraphftError
from graphft.runtime.fs import FS
from graphft.tensor_file import TENSOR_DTYPES, bytes_of, lay_out

MANIFEST = "manifest.json"
FORMAT = 1
PIECE = 8 << 20
"""Bytes that are read, written and hashed at a time."""
FOLDER = re.compile(r"checkpoint-(\d{8,})")
"""Of a version. (The folders of Hugging Face's Trainer have fewer digits.)"""


class DamagedVersion(GraphftError):
    """A file of a checkpoint is missing, or is not what was written."""


class Superseded(GraphftError):
    """Another process has committed this version, or a later one: there are two that save to one place."""


class TensorEntry(msgspec.Struct, frozen=True):
    """Where a tensor lies in its file: in bytes, from its beginning."""

    dtype: str
    shape: list[int]
    offset: int
    bytes: int
    checksum: str


class FileEntry(msgspec.Struct, frozen=True):
    """A file of tensors. `header`: bytes before the first tensor; `checksum`: of these."""

    bytes: int
    header: int
    checksum: str
    tensors: dict[str, TensorEntry]


class VersionManifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of. `made`: when (Unix seconds), where, and by which versions of what.

    `state`: what is no tensor, by the names under which it was saved, as `state_codec` writes it.
    """

    version: int
    made: dict[str, Any]
    status: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, FileEntry]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class VersionStore:
    """The checkpoints below `root`. Raises OSError where the storage fails."""

    def __init__(self, fs: FS, root: str) -> None:
        self.fs, self.root = fs, root

    # -- looking ----------------------------------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Of all that left a folder, whole or not; the newest first."""
        found = (FOLDER.fullmatch(name) for name in self.fs.list_dirs(self.root))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def committed(self, version: int) -> bool:
        """Whether it has a manifest: then it counts, if it is not damaged."""
        return self.fs.size(self._path(version, MANIFEST)) is not None

    def manifest(self, version: int) -> VersionManifest:
        """Raises DamagedVersion; FileNotFoundError where there is none."""
        path = self._path(version, MANIFEST)
        with self.fs.open(path) as file:
            data = file.read()
        manifest = decode_manifest(data, path)
        if manifest.version != version:
            raise _damaged(path, f"it is of version {manifest.version}")
        for name, entry in manifest.files.items():
            size = self.fs.size(self._path(version, name))
            if size != entry.bytes:
                found = "it is missing" if size is None else f"found {size}"
                raise _damaged(self._path(version, name), f"expected {entry.bytes} bytes, {found}")
        return manifest

    def read(self, manifest: VersionManifest, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """The tensors that are wanted, by name, each checked. Raises DamagedVersion."""
        tensors: dict[str, Tensor] = {}
        for name, entry in manifest.files.items():
            self._read_file(self._path(manifest.version, name), entry, wanted, tensors)
        return tensors

    def verify(self, manifest: VersionManifest, told: Callable[[int], None] = lambda count: None) -> None:
        """Reads everything. `told` gets the bytes of each tensor that is good. Raises DamagedVersion."""
        for name, entry in manifest.files.items():
            for tensor in entry.tensors:
                scratch: dict[str, Tensor] = {}
                self._read_file(self._path(manifest.version, name), entry, tensor.__eq__, scratch)
                told(entry.tensors[tensor].bytes)

    def _read_file(self, path: str, entry: FileEntry, wanted: Callable[[str], bool], into: dict[str, Tensor]) -> None:
        try:
            file = self.fs.open(path)
        except FileNotFoundError as error:
            raise _damaged(path, "it is missing") from error
        with file:
            if _checksum(_fill(file, bytearray(entry.header))) != entry.checksum:
                raise _damaged(path, "its header is not what was written")
            at = entry.header
            for name, tensor in sorted(entry.tensors.items(), key=lambda item: item[1].offset):
                if not wanted(name):
                    continue
                if tensor.offset != at:
                    file.seek(tensor.offset)
                value = torch.empty(tensor.shape, dtype=TENSOR_DTYPES[tensor.dtype])
                if _checksum(_fill(file, bytes_of(value))) != tensor.checksum:
                    raise _damaged(path, f"%{name} is not what was written")
                into[name], at = value, tensor.offset + tensor.bytes

    # -- writing ----------------------------------------------------------------------------------------------------

    def write(
        self,
        version: int,
        made: Mapping[str, Any],
        status: Mapping[str, Any],
        state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> VersionManifest:
        """Writes a version and commits it. Raises Superseded; GraphftError[save] for a dtype that cannot be saved."""
        name = f"tensors-{uuid.uuid4().hex[:12]}.safetensors"
        path = self._path(version, name)
        entry = self._write_file(path, tensors)
        manifest = VersionManifest(version, dict(made), dict(status), dict(state), {name: entry})
        newer = [v for v in self.versions() if v > version and self.committed(v)]
        if newer or not self.fs.create(self._path(version, MANIFEST), encode_manifest(manifest)):
            self.fs.delete(path)
            raise Superseded(
                f"{self.root}: another process has saved version {max([version, *newer])} meanwhile",
                rule="superseded",
                help="only one process may save to a path: trainer 0. Is an earlier one of this job still running?",
            )
        return manifest

    def write_copy(self, manifest: VersionManifest, tensors: Mapping[str, Tensor]) -> None:
        """Writes a version of another place here, under the same number: `tensors` are all of it."""
        for name, entry in manifest.files.items():
            written = self._write_file(self._path(manifest.version, name), {n: tensors[n] for n in entry.tensors})
            if written != entry:
                raise _damaged(self._path(manifest.version, name), "its copy is not what was read")
        if not self.fs.create(self._path(manifest.version, MANIFEST), encode_manifest(manifest)):
            raise Superseded(
                f"{self.root}: another process has made version {manifest.version} meanwhile",
                rule="superseded",
                help="copy to a folder of its own",
            )

    def _write_file(self, path: str, tensors: Mapping[str, Tensor]) -> FileEntry:
        header, order = lay_out(tensors)
        entries, at = {}, len(header)
        with self.fs.writing(path) as file:
            file.write(header)
            for name in order:
                tensor, data, digest = tensors[name], bytes_of(tensors[name]), xxhash.xxh3_128()
                for start in range(0, data.nbytes, PIECE):
                    piece = data[start : start + PIECE]
                    digest.update(piece)
                    file.write(piece)
                dtype = str(tensor.dtype).removeprefix("torch.")
                entries[name] = TensorEntry(dtype, list(tensor.shape), at, data.nbytes, digest.hexdigest())
                at += data.nbytes
        return FileEntry(at, len(header), _checksum(header), entries)

    def next_version(self) -> int:
        """Higher than all that left a folder."""
        return max(self.versions(), default=-1) + 1

    def delete(self, version: int) -> None:
        """Its manifest goes first: what is left of it does not count."""
        self.fs.delete(self._path(version, MANIFEST))
        self.fs.delete(self._path(version))

    def collect(self, below: int, keep: Collection[int]) -> list[int]:
        """Deletes the versions below, but for those to keep: also what crashes left behind. Returns them."""
        gone = [v for v in self.versions() if v < below and v not in keep]
        for version in gone:
            self.delete(version)
        return gone

    def _path(self, version: int, *names: str) -> str:
        return posixpath.join(self.root, f"checkpoint-{version:08d}", *names)


def encode_manifest(manifest: VersionManifest) -> bytes:
    body = _canonical(msgspec.to_builtins(manifest))
    return b'{"checksum":"%s","manifest":%s}\n' % (_checksum(body).encode(), body)


def decode_manifest(data: bytes, path: str) -> VersionManifest:
    """Raises DamagedVersion unless `data` is, byte for byte, what `encode_manifest` gives."""
    try:
        found = json.loads(data)
        if found["manifest"]["format"] != FORMAT:
            raise GraphftError(
                f"{path} has format {found['manifest']['format']}, this graphft knows {FORMAT}",
                rule="checkpoint-format",
                help="read it with the version of graphft that wrote it: the manifest names that under `made`",
            )
        manifest = msgspec.convert(found["manifest"], VersionManifest)
        same = encode_manifest(manifest) == data
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise _damaged(path, f"it is no manifest ({error})") from error
    if not same:
        raise _damaged(path, "it is not what was written")
    return manifest


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _checksum(data: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _fill(file: Any, into: bytearray | memoryview) -> bytearray | memoryview:
    """Reads until it is full. What is missing at the end stays as it was: the checksum tells."""
    view = memoryview(into)
    at = 0
    while at < view.nbytes and (count := file.readinto(view[at : at + PIECE])):
        at += count
    return into


def _damaged(path: str, what: str) -> DamagedVersion:
    return DamagedVersion(f"{path} is damaged: {what}", rule="checkpoint", help="an older checkpoint is used instead")
