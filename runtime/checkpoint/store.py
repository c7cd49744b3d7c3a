"""Checkpoints on a file system: numbered, checksummed, existing wholly or not at all.

    <root>/step-00000050.g2/shard-0-of-2.safetensors      one file per shard, written by that shard
                            shard-1-of-2.safetensors
                            manifest.json                 last: the checkpoint exists from here on

Every file is written under a temporary name, fsynced and renamed. Which checkpoint is *committed* is decided in
etcd (`runtime.commit`); what lies here is only what a commit may name. No pickle: safetensors and JSON. A job with a
storage has the same files there, and some of them in its folder (`stored_checkpoints`).

A manifest is checked against the sizes of its files, a part against its checksum when it is read. Two errors are told
apart: `DamagedCheckpoint`, where what was read is provably not what was written (an older one is used then), and
`StorageUnavailable`, where nothing can be said, because the storage does not answer or is not there (then one waits).
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError
from graphft.fileio import fsync, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
_DIRECTORY = re.compile(r"step-(\d+)\.g(\d+)")
_OLDER = "an older checkpoint is used instead"


class DamagedCheckpoint(GraphftError):
    """A file of a checkpoint is missing, or is not what its manifest says."""


class StorageUnavailable(GraphftError):
    """Whether a checkpoint is whole cannot be told now: its storage fails, or is not there. To be tried again."""


@contextlib.contextmanager
def storage(what: Path | str) -> Iterator[None]:
    """Turns what the operating system says of a storage that fails into StorageUnavailable. A file that is not there
    is none of it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise StorageUnavailable(
            f"{what} cannot be used: {error}",
            rule="storage",
            help="see whether the file system is mounted and healthy, and has space",
        ) from error


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's file of a checkpoint. `file` is relative to the store's root."""

    shard: int
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of. `step` is the version of the parameters in it, `run` the run that it is of."""

    generation: int
    step: int
    run: str
    parts: tuple[Part, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        return directory_name(self.generation, self.step)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        parts = tuple(Part(int(p["shard"]), str(p["file"]), str(p["sha256"]), int(p["bytes"])) for p in data["parts"])
        return Manifest(int(data["generation"]), int(data["step"]), str(data["run"]), parts, dict(data["meta"]))


def directory_name(generation: int, step: int) -> str:
    return f"step-{step:08d}.g{generation}"


class CheckpointStore:
    """The checkpoints below one folder, which all pservers of the job can reach."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def where(self, name: str = "") -> str:
        """A file or folder of the store, for a person."""
        return str(self.root / name)

    def write_part(
        self, generation: int, step: int, shard: int, shards: int, tensors: Mapping[str, Tensor], ledger: str = ""
    ) -> Part:
        """Writes one shard's file and returns its record. Safe to call again: the same bytes replace themselves.

        Raises OSError. One entry of metadata: safetensors does not say in which order it writes several.
        """
        name = f"{directory_name(generation, step)}/shard-{shard}-of-{shards}.safetensors"
        return self._write_tensors(Part(shard, name, "", 0), tensors, {"ledger": ledger})

    def write_manifest(self, manifest: Manifest) -> None:
        data = json.dumps(manifest.to_json(), indent=1, sort_keys=True).encode()
        self._write(f"{manifest.directory}/{MANIFEST}", data)

    def has_manifest(self, directory: str) -> bool:
        """Whether a checkpoint was wholly written here. Raises StorageUnavailable."""
        return self._size(f"{directory}/{MANIFEST}") is not None

    def make_durable(self, manifest: Manifest) -> None:
        """Has the file system write the entries of a checkpoint that was found here: the process that wrote it may have
        died between the last rename and the fsync of the folder. Raises StorageUnavailable."""
        files = {self.root / part.file for part in manifest.parts} | {self.root / manifest.directory / MANIFEST}
        for folder in [*sorted({path.parent for path in files}), self.root]:
            with storage(folder):
                fsync(folder)

    def read_manifest(self, directory: str) -> Manifest:
        """Raises DamagedCheckpoint when the manifest is missing or no manifest, or names a file that is not there.

        Raises StorageUnavailable when files cannot be read, and when no checkpoint is here at all.
        """
        name = f"{directory}/{MANIFEST}"
        try:
            manifest = Manifest.from_json(json.loads(self._read(name)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._check_there(directory)
            raise DamagedCheckpoint(
                f"checkpoint {self.where(directory)} has no usable manifest: {error}",
                rule="checkpoint",
                help=f"{_OLDER}; delete this folder",
            ) from error
        if manifest.directory != directory:
            raise DamagedCheckpoint(
                f"{self.where(name)} is the manifest of {manifest.directory}",
                rule="checkpoint",
                help=f"{_OLDER}; give the folder its name back",
            )
        for part in manifest.parts:
            size = self._size(part.file)
            if size != part.bytes:
                found = "it is missing" if size is None else f"found {size}"
                raise DamagedCheckpoint(
                    f"{self.where(part.file)}: expected {part.bytes} bytes, {found}", rule="checkpoint", help=_OLDER
                )
        return manifest

    def _check_there(self, directory: str) -> None:
        """Raises StorageUnavailable if neither this checkpoint's folder nor any whole checkpoint is here.

        That is how a mount looks that is away. A checkpoint that is damaged leaves its folder, or its neighbours.
        """
        if not self._has(directory) and not self.manifests():
            raise StorageUnavailable(
                f"{self.where()} holds no checkpoint, though etcd names {directory}",
                rule="storage",
                help="mount the file system that holds them; if they are gone for good, start the "
                "job anew: in a new folder, under another name",
            )

    def read_part(self, manifest: Manifest, shard: int) -> tuple[dict[str, Tensor], str]:
        """One shard's tensors and ledger, after checking the file's checksum.

        Raises DamagedCheckpoint, StorageUnavailable.
        """
        part = next((p for p in manifest.parts if p.shard == shard), None)
        if part is None:
            raise DamagedCheckpoint(
                f"checkpoint {manifest.directory} has no part of shard {shard}",
                rule="checkpoint",
                help="was the number of pservers changed? start with the number it was saved with",
            )
        path = self.where(part.file)
        try:
            tensors, metadata, found = self._read_tensors(part)
        except StorageUnavailable:
            raise
        except (OSError, GraphftError) as error:
            self._check_there(manifest.directory)
            raise DamagedCheckpoint(f"{path} cannot be read: {error}", rule="checkpoint", help=_OLDER) from error
        if found != part.sha256:
            raise DamagedCheckpoint(
                f"{path}: its checksum is {found[:12]}..., the manifest says {part.sha256[:12]}...",
                rule="checkpoint",
                help=_OLDER,
            )
        return tensors, metadata.get("ledger", "")

    def manifests(self) -> list[Manifest]:
        """Usable checkpoints, newest (by step, then generation) first. Damaged ones are left out.

        Raises StorageUnavailable: what cannot be read now is neither.
        """
        found = []
        for directory in self.directories():
            try:
                found.append(self.read_manifest(directory))
            except DamagedCheckpoint:
                continue
        return found

    def latest_generation(self) -> int:
        """The highest generation that has left anything here; -1 if none has."""
        return max((directory_key(d)[1] for d in self.directories()), default=-1)

    def prune(self, keep: int, last_good: Manifest) -> None:
        """Deletes what is older than the newest `keep` usable checkpoints: older ones, and what crashes left behind.

        Never `last_good`, nor anything of a later step or generation, which may be being written. Raises
        StorageUnavailable, when it cannot be told what is usable.
        """
        kept = 0
        for directory in self.directories():
            step, generation = directory_key(directory)
            if (step, generation) == (last_good.step, last_good.generation):
                kept += 1
            elif step >= last_good.step or generation > last_good.generation:
                continue
            elif kept < keep and self._usable(directory):
                kept += 1
            else:
                self._delete(directory)

    def _usable(self, directory: str) -> bool:
        try:
            self.read_manifest(directory)
        except DamagedCheckpoint:
            return False
        return True

    def directories(self) -> list[str]:
        """Names of the folders of checkpoints that are here, whole or not, the newest first."""
        return newest_first(self._names())

    # -- files: `name` is relative to the root ------------------------------------------------------------------------

    def _write_tensors(self, part: Part, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Part:
        from graphft.tensor_file import write_tensors

        written = write_tensors(self.root / part.file, tensors, metadata)
        return Part(part.shard, part.file, written.sha256, written.bytes)

    def _read_tensors(self, part: Part) -> tuple[dict[str, Tensor], dict[str, str], str]:
        from graphft.tensor_file import read_tensors

        with storage(self.root / part.file):
            return read_tensors(self.root / part.file)

    def _write(self, name: str, data: bytes) -> None:
        write_atomically(self.root / name, data)

    def _read(self, name: str) -> bytes:
        with storage(self.root / name):
            return (self.root / name).read_bytes()

    def _size(self, name: str) -> int | None:
        """None: it is not there. Raises StorageUnavailable."""
        try:
            with storage(self.root / name):
                return (self.root / name).stat().st_size
        except OSError:
            return None

    def _has(self, directory: str) -> bool:
        with storage(self.root / directory):
            return (self.root / directory).exists()

    def _names(self) -> list[str]:
        try:
            with storage(self.root):
                return [p.name for p in self.root.iterdir()]
        except FileNotFoundError:
            return []

    def _delete(self, directory: str) -> None:
        """As far as it can be deleted."""
        shutil.rmtree(self.root / directory, ignore_errors=True)


class Ages:
    """How old the newest file of a kind is: on this process's clock, from the moment on when it first saw it.

    Only how old it was then is by the file system's clock and this machine's; so a clock that is set back while the
    process runs changes nothing. Used by one thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._path, self._since = Path(), 0.0

    def of(self, path: Path) -> float:
        """Seconds since this file was written, also if a process before this one did; endless if it is not there."""
        if path != self._path:
            try:
                age = max(0.0, time.time() - path.stat().st_mtime)
            except OSError:
                return float("inf")
            self._path, self._since = path, self._clock() - age
        return self._clock() - self._since


def directory_key(directory: str) -> tuple[int, int]:
    """Step and generation of a checkpoint's folder."""
    match = _DIRECTORY.fullmatch(directory)
    assert match is not None
    return int(match[1]), int(match[2])


def newest_first(names: Iterable[str]) -> list[str]:
    """Those of them that name folders of checkpoints."""
    return sorted((n for n in names if _DIRECTORY.fullmatch(n)), key=directory_key, reverse=True)
