"""The checkpoints of a job with a storage: there they count, and its folder holds copies of what this machine uses.

A part is written to the job's folder and uploaded; the manifest follows when all parts are there. An object appears
wholly or not at all; where a store cannot do that, the sizes and checksums in the manifest tell. A part is read from
the folder if its checksum is right there, and is downloaded otherwise: a process that is started again where it was
before reads nothing from the storage but the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import posixpath
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import Manifest, Part, newest_first
from graphft.runtime.checkpoint.store import MANIFEST, CheckpointStore, storage
from graphft.runtime.coordination.job_storage import storage_of
from graphft.runtime.coordination.storage_fence import check_launcher
from graphft.runtime.fs import FS, file_system
from graphft.transpiler.record import RECORD

if TYPE_CHECKING:
    from graphft.checked_file import CheckedFile, Contents

T = TypeVar("T")

FOLDER = "checkpoints"
BEHIND = 8
"""No shard writes a part so many checkpoints after those that are kept."""
COPIES = 2
"""Checkpoints of which a machine keeps its parts in the job's folder: the newest, and the one that follows it."""


def checkpoints_of(job_dir: Path, shard: int | None = None) -> CheckpointStore:
    """Where the checkpoints of the job in this folder are. `shard`: async, those of one shard; the job's last manifest
    lies in the folder above."""
    names = [FOLDER] if shard is None else [FOLDER, shard_folder(shard)]
    root, url = job_dir.joinpath(*names), storage_of(job_dir)
    if not url:
        return CheckpointStore(root)
    fs, path = file_system(url)
    may_commit = functools.partial(check_launcher, job_dir)
    return StoredCheckpoints(root, fs, posixpath.join(path, *names), "/".join([url, *names]), path, may_commit)


def shard_folder(shard: int) -> str:
    """Of an async shard's checkpoints."""
    return f"shard-{shard}"


class StoredCheckpoints(CheckpointStore):
    """`root`: in the job's folder; `path`: of `fs`; `url`: the same for a person. `job`: what else is of the job lies
    there. `may_commit` raises OSError if this machine is not to."""

    def __init__(
        self, root: Path, fs: FS, path: str, url: str, job: str, may_commit: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(root)
        self.fs, self.path, self.url, self.job, self._may_commit = fs, path, url, job, may_commit

    def where(self, name: str = "") -> str:
        return f"{self.url}/{name}".rstrip("/")

    def make_durable(self, manifest: object) -> None:
        """What a storage shows is durable."""

    def _at(self, name: str) -> str:
        return posixpath.join(self.path, name)

    def _write_tensors(self, file: CheckedFile) -> None:
        super()._write_tensors(file)
        self._may_commit()
        self.fs.upload(self.root / file.name, self._at(file.name))
        self._may_commit()  # else it may have gone into the folder that is there while nothing is mounted
        found = self.fs.size(self._at(file.name))
        if found != file.entry.bytes:
            raise OSError(f"{self.where(file.name)} has {found} bytes after {file.entry.bytes} were uploaded")
        self._drop_copies(PurePosixPath(file.name).name)

    def _drop_copies(self, part: str) -> None:
        """Deletes this machine's copies of the shard's older parts. What is needed of them is downloaded again.

        Other processes of the machine write and read the parts of other shards there: those are left to them, and a
        folder that is empty is deleted only when nobody can be about to write there.
        """
        shard = part.partition(".")[0]
        for number, directory in enumerate(newest_first(super()._names())[COPIES:]):
            with contextlib.suppress(FileNotFoundError):  # another process has just deleted it
                files = list(self.root.joinpath(directory).iterdir())
                mine = [file for file in files if file.name.partition(".")[0] == shard]
                for file in mine:
                    file.unlink(missing_ok=True)
                if number >= BEHIND and {file.name for file in files if file not in mine} <= {MANIFEST}:
                    super()._delete(directory)

    def _read_part(self, part: Part) -> Contents:
        with contextlib.suppress(OSError, GraphftError):  # it is not there, or damaged: the storage's counts
            return super()._read_part(part)
        for name in part.files():
            with self._asking(name):
                self.fs.download(self._at(name), self.root / name)
        return super()._read_part(part)

    def write_manifest(self, manifest: Manifest) -> None:
        """Raises OSError if this machine is not the one that runs the job any more."""
        self._may_commit()
        super().write_manifest(manifest)

    def _write(self, name: str, data: bytes) -> None:
        super()._write(name, data)  # first: where this fails, nothing of it counts
        with self.fs.writing(self._at(name)) as file:
            file.write(data)

    def _read(self, name: str) -> bytes:
        with self._asking(name), self.fs.open(self._at(name)) as file:
            return file.read()

    def _size(self, name: str) -> int | None:
        with self._asking(name):
            return self._unless_away(self.fs.size(self._at(name)))

    def _has(self, directory: str) -> bool:
        with self._asking(directory):
            return bool(self._unless_away(self.fs.stat(self._at(directory))))

    def _names(self) -> list[str]:
        with self._asking():
            return self._unless_away(self.fs.list_dirs(self.path))

    @contextlib.contextmanager
    def _asking(self, name: str = "") -> Iterator[None]:
        """Raises StorageUnavailable; FileNotFoundError for what the storage does not have."""
        with storage(self.where(name)):
            try:
                yield
            except FileNotFoundError:
                self._unless_away(None)
                raise

    def _unless_away(self, found: T) -> T:
        """What was found. That nothing was counts only if the job's record is there: a file system that is not mounted
        is an empty folder."""
        if not found and self.fs.size(posixpath.join(self.job, RECORD)) is None:
            raise OSError("nothing of the job is there: is the file system mounted?")
        return found

    def _delete(self, directory: str) -> None:
        super()._delete(directory)
        with contextlib.suppress(OSError):  # what is left goes with a later checkpoint
            self.fs.delete(self._at(directory))

    def _trim(self, directory: str, needed: Collection[str]) -> None:
        super()._delete(directory)
        with contextlib.suppress(OSError):
            self.fs.delete(self._at(f"{directory}/{MANIFEST}"))
            for name in self.fs.ls_dir(self._at(directory)):
                if f"{directory}/{name}" not in needed:
                    self.fs.delete(self._at(f"{directory}/{name}"))
