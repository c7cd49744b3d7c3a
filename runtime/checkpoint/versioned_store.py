"""Numbered checkpoints on a file system: each is there wholly, or not at all.

    <root>/step-00000050.g2/shard-0-of-2.5f0c12ab.safetensors    first: files of tensors, one per shard
                            shard-1-of-2.a90b33f1.safetensors
                            manifest.json                         last: the checkpoint exists from here on

A training loop's folders are called `checkpoint-00000012`. A file has the token of its process in its name, so that no
process changes what another one wrote.

Two errors are told apart: `DamagedCheckpoint`, where what was read is provably not what was written (an older
checkpoint is used then), and `StorageUnavailable`, where the storage fails or is not there.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import (
    Manifest,
    Part,
    decode_manifest,
    directory_key,
    directory_name,
    encode_manifest,
    is_directory,
)
from graphft.runtime.fs import FS

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.disk.tensor_file import Header

log = logging.getLogger("graphft")
T = TypeVar("T")

MANIFEST = "manifest.json"
NOTE = "note"
"""In the metadata of a part."""
NO_MANIFEST = "has no manifest (a save that was killed or is under way, or it was lost)"
"""Said of a folder that does not count."""
_OLDER = "an older checkpoint is used instead; `graphft checkpoint verify` says which are whole"


class DamagedCheckpoint(GraphftError):
    """A file of a checkpoint is missing, or is not what its manifest says."""


class DeletedCheckpoint(DamagedCheckpoint):
    """A checkpoint has no manifest, or has none any more: the process that saves there may have deleted it."""


class StorageUnavailable(GraphftError, OSError):
    """The storage fails or is not there, so nothing can be said of its checkpoints now. To be tried again."""


@contextlib.contextmanager
def storage(what: Path | str) -> Iterator[None]:
    """Turns what the operating system says of a storage that fails into StorageUnavailable. A file that is not there is
    none of it."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, StorageUnavailable):
        raise
    except OSError as error:
        raise unavailable(what, error) from error


def unavailable(what: Path | str, error: OSError) -> StorageUnavailable:
    found = StorageUnavailable(
        f"{what} cannot be used: {error}",
        rule="storage",
        help="see whether the path is right, the file system mounted and healthy, and has space, and whether this "
        "process may write there",
    )
    found.errno = error.errno
    return found


class VersionedStore:
    """The checkpoints below the folder `root` of a file system, which `url` names for people. `inner` is the folder in
    it, "shard-0/", of a store that lies within another one: names of files are relative to the root of both.

    What it is asked raises StorageUnavailable where the storage fails; what it is to write raises OSError.
    """

    def __init__(self, fs: FS, root: str, url: str = "", inner: str = "") -> None:
        self.fs, self.root, self.url, self.inner = fs, root, url or root, inner
        self._token = uuid.uuid4().hex[:8]

    def where(self, directory: str = "") -> str:
        """Returns the place of the store, or of a checkpoint, for a person."""
        return f"{self.url}/{self.inner}{directory}".rstrip("/")

    # -- reading ------------------------------------------------------------------------------------------------------

    def directories(self) -> list[str]:
        """Returns the names of the folders of checkpoints that are here, whole or not, the newest first."""
        return sorted(filter(is_directory, self._names(self.inner)), key=directory_key, reverse=True)

    def has_manifest(self, directory: str) -> bool:
        """True if a checkpoint was wholly written here."""
        return self._size(f"{self.inner}{directory}/{MANIFEST}") is not None

    def unfinished(self) -> list[str]:
        """Returns the folders without a manifest that have files."""
        return [d for d in self.directories() if not self.has_manifest(d) and self._names(f"{self.inner}{d}")]

    def read_manifest(self, directory: str) -> Manifest:
        """Raises DamagedCheckpoint if it is no manifest, or names a file that is not there; DeletedCheckpoint."""
        with self._reading(directory):
            manifest = self._decoded(directory)
            for part in manifest.parts:
                if (size := self._size(part.file)) != part.bytes:
                    found = "it is missing" if size is None else f"found {size}"
                    raise ValueError(f"{part.file} is damaged: expected {part.bytes} bytes, {found}")
        return manifest

    def _decoded(self, directory: str) -> Manifest:
        name = f"{self.inner}{directory}/{MANIFEST}"
        with contextlib.closing(self._open(name)) as file:
            data = file.read()
        try:
            manifest = decode_manifest(data)
        except ValueError as error:
            raise ValueError(f"{name} is damaged: {error}") from error
        if manifest.directory != directory:
            raise ValueError(f"{name} is the manifest of {manifest.directory}")
        return manifest

    def manifests(self) -> list[Manifest]:
        """Returns the manifests of all usable checkpoints, the newest (by step, then generation) first."""
        found = []
        for directory in self.directories():
            with contextlib.suppress(DamagedCheckpoint):
                found.append(self.read_manifest(directory))
        return found

    def read_part(self, manifest: Manifest, shard: int) -> tuple[dict[str, Tensor], str]:
        """Returns one shard's tensors, each checked, and its note. Raises DamagedCheckpoint."""
        part = next((p for p in manifest.parts if p.shard == shard), None)
        if part is None:
            raise DamagedCheckpoint(
                f"checkpoint {manifest.directory} has no part of shard {shard}",
                rule="checkpoint",
                help="was the number of pservers changed? start with the number it was saved with",
            )
        with self._opened(manifest, part) as (header, tensors):
            return dict(tensors), header.metadata.get(NOTE, "")

    def header_of(self, manifest: Manifest, part: Part) -> Header:
        """Returns what a part's header says. Raises DamagedCheckpoint."""
        with self._opened(manifest, part) as (header, _):
            return header

    def verify(self, manifest: Manifest) -> None:
        """Reads every byte. Raises DamagedCheckpoint."""
        for part in manifest.parts:
            with self._opened(manifest, part) as (_, tensors):
                for _ in tensors:
                    pass

    def first_whole(self, directories: Iterable[str], read: Callable[[Manifest], T]) -> T | None:
        """Returns what `read` makes of the first of these checkpoints that is whole; None if there are none at all.

        Names those that are damaged. Raises DamagedCheckpoint if all are, DeletedCheckpoint if one was deleted
        meanwhile.
        """
        damaged: list[str] = []
        for directory in directories:
            try:
                found = read(self.read_manifest(directory))
            except DeletedCheckpoint:
                raise
            except DamagedCheckpoint as error:
                damaged.append(error.message)
                log.error("%s", error.message)
                continue
            if damaged:
                log.error("going back to %s, the newest that is whole", self.where(directory))
            return found
        if damaged:
            raise DamagedCheckpoint(
                f"{self.url}: none of {len(damaged)} checkpoints that were read is whole: {'; '.join(damaged[:3])}",
                rule="checkpoint",
                help="`graphft checkpoint verify` says which are; or restore them from a copy",
            )
        return None

    @contextlib.contextmanager
    def _opened(self, manifest: Manifest, part: Part) -> Iterator[tuple[Header, Iterator[tuple[str, Tensor]]]]:
        from graphft.disk.tensor_file import each_tensor, read_header

        with self._reading(manifest.directory), contextlib.closing(self._open(part.file)) as file:
            header = read_header(file, part.bytes, part.file, part.checksum)
            yield header, each_tensor(file, header, part.file)

    @contextlib.contextmanager
    def _reading(self, directory: str) -> Iterator[None]:
        """Turns what is wrong with a checkpoint into DamagedCheckpoint, and DeletedCheckpoint if it has no manifest."""
        try:
            with storage(self.where(directory)):
                yield
        except StorageUnavailable:
            raise
        except (OSError, ValueError, GraphftError) as error:
            if not self.has_manifest(directory):
                self.check_there(directory)
                raise DeletedCheckpoint(
                    f"checkpoint {self.where(directory)} has no manifest: it was deleted, or lost",
                    rule="checkpoint",
                    help="the process that saves there keeps the newest; so look again",
                ) from error
            what = f"{self.inner}{directory} lacks a file: {error}" if isinstance(error, OSError) else str(error)
            what = error.message if isinstance(error, GraphftError) else what
            raise DamagedCheckpoint(f"{self.url}/{what}", rule="checkpoint", help=_OLDER) from error

    def check_there(self, directory: str = "") -> None:
        """Called where something (of that checkpoint) was not found: raises StorageUnavailable if the storage is away,
        so that nothing follows from it."""

    # -- writing ------------------------------------------------------------------------------------------------------

    def write_part(
        self, generation: int, step: int, shard: int, shards: int, tensors: Mapping[str, Tensor], note: str = ""
    ) -> Part:
        """Writes one shard's file and returns its record. Raises OSError."""
        from graphft.disk.tensor_file import tensor_file

        made = tensor_file(tensors, {NOTE: note})
        name = f"{directory_name(generation, step)}/shard-{shard}-of-{shards}.{self._token}.safetensors"
        with self.fs.writing(self._at(self.inner + name)) as target:
            made.write(target)
        return Part(shard, self.inner + name, made.bytes, made.checksum)

    def write_manifest(self, manifest: Manifest) -> None:
        """Raises OSError."""
        with self.fs.writing(self._at(f"{self.inner}{manifest.directory}/{MANIFEST}")) as file:
            file.write(encode_manifest(manifest))

    def create_manifest(self, manifest: Manifest) -> bool:
        """Does as `write_manifest`; returns False, and writes nothing, if there is one. Raises OSError."""
        return self.fs.create(self._at(f"{self.inner}{manifest.directory}/{MANIFEST}"), encode_manifest(manifest))

    # -- deleting -----------------------------------------------------------------------------------------------------

    def discard(self, directories: Iterable[str]) -> None:
        """Deletes checkpoints, each manifest first. Raises StorageUnavailable at the end if some could not be
        deleted."""
        failed: OSError | None = None
        for directory in directories:
            folder = f"{self.inner}{directory}"
            try:
                self.fs.delete(self._at(f"{folder}/{MANIFEST}"))
                self.fs.delete(self._at(folder))
            except FileNotFoundError:  # another process deletes it, too
                continue
            except OSError as error:
                failed = error
        if failed is not None:
            raise unavailable(self.where(), failed) from failed

    # -- files: names are relative to the root ------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return posixpath.join(self.root, name)

    def _open(self, name: str) -> BinaryIO:
        with storage(f"{self.url}/{name}"):
            return self.fs.open(self._at(name))

    def _size(self, name: str) -> int | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), storage(f"{self.url}/{name}"):
            if (size := self.fs.size(self._at(name))) is not None:
                return size
        self.check_there()
        return None

    def _names(self, folder: str = "") -> list[str]:
        try:
            with storage(f"{self.url}/{folder}"):
                found = self.fs.ls_dir(self._at(folder).rstrip("/"))
        except NotADirectoryError as error:
            raise unavailable(f"{self.url}/{folder}".rstrip("/"), error) from error
        if not found:
            self.check_there()
        return found
