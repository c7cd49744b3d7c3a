"""Numbered checkpoints in a folder of any file system: each is there wholly, or not at all.

    <root>/checkpoint-00000012/tensors-<token>.safetensors     written first, under a name that no other process has
                               manifest.json                    last, made only if there is none: the commit

The manifest has what the file must be, and is sealed; the file has a checksum of each tensor (`checked_file`). So every
flipped bit of either is found. A file may need those of earlier versions, for what did not change since: these stay
when their version goes.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO

import msgspec
from torch import Tensor

from graphft.block_deltas import Base, FileEntry, Known
from graphft.checked_file import checked_file, read_base, read_checked, verify_checked
from graphft.errors import GraphftError
from graphft.fileio import PIECE
from graphft.runtime.fs import FS
from graphft.sealed_json import seal, unseal

log = logging.getLogger("graphft")

MANIFEST = "manifest.json"
FORMAT = 2
LOOKS = 10
"""Before old versions are deleted: so often it looks again while others come and go; then they stay for now."""
_OTHER_FORMAT = "checkpoint-format"
_FILE = re.compile(r"checkpoint-\d{8,}/tensors-[0-9a-f]+\.safetensors")
_OLDER = "`graphft checkpoint verify` says which are whole; loading takes the newest of these"
FOLDER = re.compile(r"checkpoint-(\d{8}|[1-9]\d{8,})")
"""Of a version. (The folders of Hugging Face's Trainer have fewer digits, most of them.)"""
_OURS = re.compile(r"manifest\.json|tensors-[0-9a-f]+\.safetensors|\..*")
"""Files of a version's folder; the last are halves that a process left."""


class DamagedVersion(GraphftError):
    """A file of a checkpoint is missing, or is not what was written."""


class DeletedVersion(DamagedVersion):
    """It was there, and was deleted while it was read: by the retention of the process that saves here."""


class Superseded(GraphftError):
    """Another process has committed this version, or a later one: there are two that save to one place."""


class VersionManifest(msgspec.Struct, frozen=True):
    """What a checkpoint consists of. `made`: when (Unix seconds), where, and by which versions of what.

    `state`: what is no tensor, by the names under which it was saved, as `state_codec` writes it. `files`: by their
    names below the root.
    """

    version: int
    made: dict[str, Any]
    status: dict[str, Any]
    state: dict[str, Any]
    files: dict[str, FileEntry]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Of its own files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def needs(self) -> dict[str, int]:
        """Files of earlier versions, and their sizes."""
        return {name: size for file in self.files.values() for name, size in file.needs.items()}


class VersionStore:
    """The checkpoints below `root`. Raises OSError where the storage fails."""

    def __init__(self, fs: FS, root: str) -> None:
        self.fs, self.root = fs, root
        self._base: Base | None = None
        """What is known of the newest version, for the next one to refer to; None before this object has read all of a
        version, or written one."""
        self._needs: dict[int, dict[str, int]] = {}
        """By version, once its manifest was read."""

    # -- looking ----------------------------------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Of all that left a folder, whole or not; the newest first."""
        found = (FOLDER.fullmatch(name) for name in self.fs.list_dirs(self.root))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def all_committed(self) -> list[int]:
        """The versions that count, if they are not damaged; the newest first.

        While another process saves and deletes here, all that were listed may be gone when they are looked at.
        """
        found: list[int] = []
        listed: list[int] = []
        while not found and listed != (now := self.versions()):
            listed, found = now, [version for version in now if self.committed(version)]
        return found

    def without_manifest(self) -> list[int]:
        """Versions that do not count, though they have files that none of the others needs; the newest first."""
        committed = self.all_committed()
        needed = {posixpath.dirname(name) for v in committed for name in self._needs_of(v)}
        others = (v for v in self.versions() if v not in committed and _folder(v) not in needed)
        return [v for v in others if any(map(_OURS.fullmatch, self.fs.ls_dir(self._at(_folder(v)))))]

    def check_place(self) -> None:
        """Nothing is here: but is it beside a place where checkpoints are? Raises GraphftError, or warns."""
        above, name = posixpath.split(self.root.rstrip("/"))
        if FOLDER.fullmatch(name) and self.fs.size(posixpath.join(self.root, MANIFEST)) is not None:
            raise GraphftError(
                f"{self.root} is a version of a checkpoint, not the place where they are saved",
                rule="checkpoint",
                help=f"give {above}; and version={int(name.rpartition('-')[2])} for this one",
            )
        for folder in self.fs.list_dirs(self.root):
            if any(map(FOLDER.fullmatch, self.fs.list_dirs(self._at(folder)))):
                log.warning("%s has no checkpoint, but %s has: is that meant?", self.root, self._at(folder))

    def committed(self, version: int) -> bool:
        """Whether it has a manifest: then it counts, if it is not damaged."""
        return self.fs.size(self._path(version, MANIFEST)) is not None

    def manifest(self, version: int) -> VersionManifest:
        """Raises DamagedVersion; DeletedVersion where there is none."""
        path = self._path(version, MANIFEST)
        with self._reading(version):
            with self.fs.open(path) as file:
                data = file.read()
            manifest = decode_manifest(data, path)
            if manifest.version != version:
                raise _damaged(path, f"it is of version {manifest.version}")
            expected = {**{name: entry.bytes for name, entry in manifest.files.items()}, **manifest.needs}
            for name, expected_bytes in expected.items():
                size = self.fs.size(self._at(name))
                if size != expected_bytes:
                    found = "it is missing" if size is None else f"found {size}"
                    raise _damaged(self._at(name), f"expected {expected_bytes} bytes, {found}")
        return manifest

    def read(self, manifest: VersionManifest, *, to_go_on: bool = False) -> dict[str, Tensor]:
        """Its tensors by name, each checked. `to_go_on`: it is the newest version; the next one is written to what it
        has. Raises DamagedVersion."""
        tensors: dict[str, Tensor] = {}
        for name, entry in manifest.files.items():
            with self._reading(manifest.version):
                contents = read_checked(self._open, name, entry)
            tensors |= contents.tensors
            if to_go_on and len(manifest.files) == 1:
                self._base = contents.base
        return tensors

    def tensors_in(self, manifest: VersionManifest) -> dict[str, Known]:
        """By name, what its files say of them. Raises DamagedVersion."""
        found: dict[str, Known] = {}
        for name, entry in manifest.files.items():
            with self._reading(manifest.version):
                found |= read_base(self._open, name, entry).tensors
        return found

    def verify(self, manifest: VersionManifest, told: Callable[[int], object] = id) -> None:
        """Reads everything. `told` gets the bytes of each tensor that is good. Raises DamagedVersion."""
        for name, entry in manifest.files.items():
            with self._reading(manifest.version):
                verify_checked(self._open, name, entry, told)

    def _open(self, name: str) -> BinaryIO:
        return self.fs.open(self._at(name))

    @contextlib.contextmanager
    def _reading(self, version: int) -> Iterator[None]:
        """What is wrong with a version becomes DamagedVersion; DeletedVersion if it is there no more."""
        try:
            yield
        except (FileNotFoundError, GraphftError) as error:
            if not self.committed(version):
                raise DeletedVersion(
                    f"checkpoint {version} of {self.root} is there no more: it was deleted meanwhile",
                    rule="checkpoint",
                    help="the process that saves there keeps the newest; so look again",
                ) from error
            if isinstance(error, FileNotFoundError):
                raise _damaged(self.root, f"a file is missing: {error}") from error
            if isinstance(error, DamagedVersion) or error.rule == _OTHER_FORMAT:
                raise
            raise DamagedVersion(posixpath.join(self.root, error.message), rule="checkpoint", help=_OLDER) from error

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
        token = uuid.uuid4().hex[:12]
        name = f"{_folder(version)}/tensors-{token}.safetensors"
        if self._base is not None:
            file = checked_file(tensors, lambda refers: name, base=self._if_there(self._base))
        else:  # it may have been damaged since it was written, or have been found to be damaged
            file = checked_file(
                tensors, lambda refers: name, base=self._if_there(self._base_of_newest()), open_file=self._open
            )
        path = self._at(name)
        with self.fs.writing(path) as target:
            file.write(target)
        manifest = VersionManifest(version, dict(made), dict(status), dict(state), {name: file.entry})
        newer = [v for v in self.all_committed() if v > version]
        if newer or not self._commit(manifest):
            self.fs.delete(path)
            raise Superseded(
                f"{self.root}: another process has saved version {max([version, *newer])} meanwhile",
                rule="superseded",
                help="only one process may save to a path: trainer 0. Is an earlier one of this job still running?",
            )
        self._base = file.base
        return manifest

    def _if_there(self, base: Base | None) -> Base | None:
        """None if one of its files is gone, or has another size."""
        gone = base is None or any(self.fs.size(self._at(name)) != size for name, size in base.files.items())
        return None if gone else base

    def _base_of_newest(self) -> Base | None:
        """What its header says."""
        newest = next(iter(self.all_committed()), None)
        if newest is None:
            return None
        try:
            ((name, entry),) = self.manifest(newest).files.items()
            with self._reading(newest):
                return read_base(self._open, name, entry)
        except (DamagedVersion, ValueError):
            return None

    def _commit(self, manifest: VersionManifest) -> bool:
        """False: another process has committed this version."""
        return self.fs.create(self._path(manifest.version, MANIFEST), encode_manifest(manifest))

    def copy(self, manifest: VersionManifest, source: VersionStore, told: Callable[[int], object] = id) -> None:
        """Writes a version of another place here, byte by byte the same, with what it needs of earlier ones. One that
        this place has is written again: it is damaged.

        Raises DamagedVersion if it is damaged there, or its copy is not what was read; Superseded.
        """
        source.verify(manifest)
        there = self.committed(manifest.version)
        for name, size in {**manifest.needs, **{n: entry.bytes for n, entry in manifest.files.items()}}.items():
            if self.fs.size(self._at(name)) == size and not there:
                continue
            with (
                source._reading(manifest.version),
                source._open(name) as file,
                self.fs.writing(self._at(name)) as target,
            ):
                while piece := file.read(PIECE):
                    target.write(piece)
        self.verify(manifest, told)
        if not there and not self._commit(manifest):
            raise Superseded(
                f"{self.root}: another process has made version {manifest.version} meanwhile",
                rule="superseded",
                help="copy to a folder of its own",
            )

    def has(self, manifest: VersionManifest) -> bool:
        """Whether this very version was committed here, damaged or not."""
        with (
            contextlib.suppress(FileNotFoundError, DamagedVersion),
            self.fs.open(self._path(manifest.version, MANIFEST)) as file,
        ):
            return decode_manifest(file.read(), "") == manifest
        return False

    def next_version(self) -> int:
        """Higher than all that left a folder."""
        return max(self.versions(), default=-1) + 1

    def collect(self, below: int, keep: Collection[int]) -> list[int]:
        """Deletes the versions below, but for those to keep and the files that these need; also what crashes left
        behind. Returns those that counted until then, or left nothing now."""
        looked = self._look_at_needs()
        if looked is None:
            return []
        there, needs = looked
        gone = [v for v in there if v < below and v not in keep]
        needed = {name for v, names in needs.items() if v not in gone for name in names}
        found = []
        for version in gone:
            counted = self.committed(version)
            if not counted and not all(map(_OURS.fullmatch, self.fs.ls_dir(self._at(_folder(version))))):
                continue  # a folder of this name that is another program's
            self.fs.delete(self._path(version, MANIFEST))  # first: what is left of it does not count
            if not self._trim(version, needed) or counted:
                found.append(version)
        return found

    def _look_at_needs(self) -> tuple[list[int], dict[int, dict[str, int]]] | None:
        """All versions, and what each that is committed needs of others, at one time; None while others change them.

        The next version refers to what the newest has, or needs itself. So the needs of the newest must be known,
        though another process may commit versions and delete some while this one looks.
        """
        for _ in range(LOOKS):
            there, needs = self.versions(), {}
            for version in filter(self.committed, there):
                needs[version] = self._needs_of(version)
            if self.all_committed() == list(needs):
                return there, needs
        return None

    def _needs_of(self, version: int) -> dict[str, int]:
        if version not in self._needs:
            try:
                with self.fs.open(self._path(version, MANIFEST)) as file:
                    self._needs[version] = decode_manifest(file.read(), "").needs
            except (FileNotFoundError, DamagedVersion):
                return {}
        return self._needs[version]

    def _trim(self, version: int, needed: Collection[str]) -> bool:
        """Whether something of it is left."""
        folder = _folder(version)
        if not any(posixpath.dirname(name) == folder for name in needed):
            self.fs.delete(self._at(folder))
            return False
        for name in self.fs.ls_dir(self._at(folder)):
            if f"{folder}/{name}" not in needed:
                self.fs.delete(self._at(f"{folder}/{name}"))
        return True

    def _path(self, version: int, *names: str) -> str:
        return posixpath.join(self.root, _folder(version), *names)

    def _at(self, name: str) -> str:
        return posixpath.join(self.root, name)


def _folder(version: int) -> str:
    return f"checkpoint-{version:08d}"


def encode_manifest(manifest: VersionManifest) -> bytes:
    return seal(msgspec.to_builtins(manifest))


def decode_manifest(data: bytes, path: str) -> VersionManifest:
    """Raises DamagedVersion unless `data` is, byte for byte, what `encode_manifest` gives."""
    try:
        found = unseal(data)
        if found["format"] != FORMAT:
            raise GraphftError(
                f"{path} has format {found['format']}, this graphft knows {FORMAT}",
                rule=_OTHER_FORMAT,
                help="read it with the version of graphft that wrote it: the manifest names that under `made`",
            )
        manifest = msgspec.convert(found, VersionManifest)
        foreign = [name for name in (*manifest.files, *manifest.needs) if not _FILE.fullmatch(name)]
        if foreign:
            raise ValueError(f"it names the file {foreign[0]!r}")
        return manifest
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: str, what: str) -> DamagedVersion:
    return DamagedVersion(f"{path} is damaged: {what}", rule="checkpoint", help=_OLDER)
