"""Checkpoints on a file system: numbered, checksummed, existing wholly or not at all.

    <root>/step-00000050.g2/shard-0-of-2.safetensors      one file per shard, written by that shard
                            shard-1-of-2.safetensors
                            manifest.json                 last: the checkpoint exists from here on

Every file is written under a temporary name, fsynced and renamed. Which checkpoint is *committed* is decided in
etcd (`runtime.commit`); what lies here is only what a commit may name. No pickle: safetensors and JSON. A job with a
storage has the same files there, and some of them in its folder (`stored_checkpoints`).

A part may need files of earlier checkpoints, for what did not change since (`graphft.checked_file`); it has the name of
its process then, `shard-0-of-2.5f0c….safetensors`. What it refers to is the part before it of the same process, in the
same generation: that one, or what it needs, is in every newer checkpoint, and so nothing of it is deleted before.

A manifest is sealed, and checked against the sizes of its files; a part against its checksums when it is read. Two
errors are told apart: `DamagedCheckpoint`, where what was read is provably not what was written (an older one is used
then), and `StorageUnavailable`, where nothing can be said, because the storage does not answer or is not there (then
one waits).
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from graphft.block_deltas import Base
from graphft.errors import GraphftError
from graphft.fileio import fsync, open_regular, read_regular, replacing, write_atomically
from graphft.runtime.checkpoint.floor import Floor
from graphft.runtime.checkpoint.manifest import (
    Manifest,
    Part,
    decode_manifest,
    directory_key,
    directory_name,
    encode_manifest,
    newest_first,
)
from graphft.sealed_json import seal, unseal

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.checked_file import CheckedFile, Contents

MANIFEST = "manifest.json"
NO_MANIFEST = "has no manifest (a save that was killed or is under way, or it was lost)"
"""What is said of a folder that does not count."""
FLOOR = "floor.json"
"""In a store's root: which checkpoint was put in the place of what was there (`set_floor`)."""
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
class _Written:
    """The part that was written last: to what it may have referred, and what one after it may."""

    generation: int
    step: int
    before: Base | None
    base: Base


class CheckpointStore:
    """The checkpoints below one folder, which all pservers of the job can reach."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._token = uuid.uuid4().hex[:8]
        self._last: _Written | None = None

    def where(self, name: str = "") -> str:
        """A file or folder of the store, for a person."""
        return str(self.root / name)

    def write_part(
        self, generation: int, step: int, shard: int, shards: int, tensors: Mapping[str, Tensor], ledger: str = ""
    ) -> Part:
        """Writes one shard's file and returns its record. Safe to call again: the same bytes replace themselves.

        Raises OSError, StorageUnavailable. A store writes the parts of one shard.
        """
        from graphft.checked_file import checked_file

        folder, base = directory_name(generation, step), self._base_for(generation, step)

        def name(refers: bool) -> str:
            token = f".{self._token}" * refers
            return f"{folder}/shard-{shard}-of-{shards}{token}.safetensors"

        file = checked_file(tensors, name, ledger, base)
        self._write_tensors(file)
        self._last = _Written(generation, step, base, file.base)
        return Part(shard, file.name, file.entry)

    def _base_for(self, generation: int, step: int) -> Base | None:
        """What a part may refer to. If it is written once more, to the same as before."""
        last = self._last
        if last is None or last.generation != generation or last.step > step:
            return None
        base = last.before if last.step == step else last.base
        if base is None or any(self._size(name) != size for name, size in base.files.items()):
            return None
        return base

    def write_manifest(self, manifest: Manifest) -> None:
        self._write(f"{manifest.directory}/{MANIFEST}", encode_manifest(manifest))

    def take_back(self, manifest: Manifest) -> bool:
        """Deletes a checkpoint from which no process goes on yet, its manifest first. Returns whether it is known to be
        none any more."""
        self._trim(manifest.directory, ())
        self._delete(manifest.directory)
        try:
            return not self.has_manifest(manifest.directory)
        except StorageUnavailable:
            return False

    def has_manifest(self, directory: str) -> bool:
        """Whether a checkpoint was wholly written here. Raises StorageUnavailable."""
        return self._size(f"{directory}/{MANIFEST}") is not None

    def make_durable(self, manifest: Manifest) -> None:
        """Has the file system write the entries of a checkpoint that was found here: the process that wrote it may have
        died between the last rename and the fsync of the folder. Raises StorageUnavailable."""
        files = {self.root / name for name in manifest.files()} | {self.root / manifest.directory / MANIFEST}
        for folder in [*sorted({path.parent for path in files}), self.root]:
            with storage(folder):
                fsync(folder)

    def read_manifest(self, directory: str) -> Manifest:
        """Raises DamagedCheckpoint when the manifest is missing or no manifest, or names a file that is not there.

        Raises StorageUnavailable when files cannot be read, and when no checkpoint is here at all.
        """
        name = f"{directory}/{MANIFEST}"
        try:
            manifest = decode_manifest(self._read(name))
        except (OSError, ValueError) as error:
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
        for file, expected in manifest.files().items():
            size = self._size(file)
            if size != expected:
                found = "it is missing" if size is None else f"found {size}"
                raise DamagedCheckpoint(
                    f"{self.where(file)}: expected {expected} bytes, {found}", rule="checkpoint", help=_OLDER
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
        try:
            contents = self._read_part(part)
        except StorageUnavailable:
            raise
        except (OSError, GraphftError) as error:
            self._check_there(manifest.directory)
            what = f"{self.where(part.file)} cannot be read: {error}"
            if isinstance(error, GraphftError):
                what = self.where(f"{part.root}{error.message}")
            raise DamagedCheckpoint(what, rule="checkpoint", help=_OLDER) from error
        return contents.tensors, contents.note

    def manifests(self, *, every: bool = False) -> list[Manifest]:
        """Usable checkpoints, newest (by step, then generation) first. Damaged ones are left out, and (but for `every`)
        those below the floor.

        Raises StorageUnavailable: what cannot be read now is neither.
        """
        found, floor = [], None if every else self.floor()
        for directory in self.directories():
            try:
                manifest = self.read_manifest(directory)
            except DamagedCheckpoint:
                continue
            if floor is None or floor.carries(manifest):
                found.append(manifest)
        return found

    def set_floor(self, manifest: Manifest) -> None:
        """This checkpoint's values were put in the place of others: of those of its run before it, none counts any
        more, also when it is lost. Raises OSError."""
        try:
            before = self.floor()
        except StorageUnavailable:
            before = None  # it is damaged, and being replaced
        self._write(FLOOR, seal(msgspec.to_builtins(Floor.of(manifest, before))))

    def floor(self) -> Floor | None:
        """None: all checkpoints count. Raises StorageUnavailable."""
        try:
            return msgspec.convert(unseal(self._read(FLOOR)), Floor)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, msgspec.ValidationError) as error:
            raise StorageUnavailable(
                f"{self.where(FLOOR)} cannot be read: {error}; it says which checkpoints count",
                rule="storage",
                help="bring it back as it was; or begin a new run: in a new folder, under another name",
            ) from error

    def latest_generation(self) -> int:
        """The highest generation that has left anything here; -1 if none has."""
        return max((directory_key(d)[1] for d in self.directories()), default=-1)

    def prune(self, keep: int, last_good: Manifest, used: Collection[str] = ()) -> None:
        """Deletes what is older than the newest `keep` usable checkpoints: older ones, and what crashes left behind.
        Files that these checkpoints need stay, and so do the checkpoints that are `used`, by the names of their
        folders.

        Never `last_good`, nor anything of a later step or generation, which may be being written. Raises
        StorageUnavailable, when it cannot be told what is usable.
        """
        kept, needed, gone = 0, set(last_good.files()), list[str]()
        for directory in self.directories():
            step, generation = directory_key(directory)
            if (step, generation) == (last_good.step, last_good.generation):
                kept += 1
            elif step >= last_good.step or generation > last_good.generation:
                continue
            elif (kept < keep or directory in used) and (usable := self._usable(directory)) is not None:
                kept += directory not in used
                needed |= usable.files().keys()
            else:
                gone.append(directory)
        for directory in gone:
            if any(name.startswith(f"{directory}/") for name in needed):
                self._trim(directory, needed)
            else:
                self._delete(directory)

    def _usable(self, directory: str) -> Manifest | None:
        try:
            return self.read_manifest(directory)
        except DamagedCheckpoint:
            return None

    def directories(self) -> list[str]:
        """Names of the folders of checkpoints that are here, whole or not, the newest first."""
        return newest_first(self._names())

    # -- files: `name` is relative to the root ------------------------------------------------------------------------

    def _write_tensors(self, file: CheckedFile) -> None:
        with replacing(self.root / file.name) as written:
            file.write(written)

    def _read_part(self, part: Part) -> Contents:
        from graphft.checked_file import read_checked

        def opened(name: str) -> BinaryIO:
            path = self.root / f"{part.root}{name}"
            with storage(path):
                return open_regular(path, 0)

        with storage(self.root / part.file):
            return read_checked(opened, part.file.removeprefix(part.root), part.entry)

    def _write(self, name: str, data: bytes) -> None:
        write_atomically(self.root / name, data)

    def _read(self, name: str) -> bytes:
        with storage(self.root / name):
            return read_regular(self.root / name)

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

    def _trim(self, directory: str, needed: Collection[str]) -> None:
        """Deletes its manifest, and then what is not needed, as far as it can be deleted."""
        with contextlib.suppress(OSError):
            (self.root / directory / MANIFEST).unlink(missing_ok=True)
            for path in self.root.joinpath(directory).iterdir():
                if f"{directory}/{path.name}" not in needed:
                    path.unlink(missing_ok=True)


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
