"""Checkpoints on a file system: numbered, checksummed, existing wholly or not at all.

    <root>/step-00000050.g2/shard-0-of-2.safetensors      one file per shard, written by that shard
                            shard-1-of-2.safetensors
                            manifest.json                 last: the checkpoint exists from here on

Every file is written under a temporary name, fsynced and renamed. Which checkpoint is *committed* is decided in
etcd (`runtime.commit`); what lies here is only what a commit may name. No pickle: safetensors and JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from graphft.errors import GraphftError

_DIRECTORY = re.compile(r"step-(\d+)\.g(\d+)")


class DamagedCheckpoint(GraphftError):
    """A file of a checkpoint is missing, or is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's file of a checkpoint. `file` is relative to the store's root."""

    shard: int
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of. `step` is the version of the parameters in it."""

    generation: int
    step: int
    program: str
    parts: tuple[Part, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        return directory_name(self.generation, self.step)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Manifest:
        parts = tuple(Part(**p) for p in data["parts"])
        return Manifest(int(data["generation"]), int(data["step"]), str(data["program"]), parts, dict(data["meta"]))


def directory_name(generation: int, step: int) -> str:
    return f"step-{step:08d}.g{generation}"


class CheckpointStore:
    """The checkpoints below one folder, which all pservers of the job can reach."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def write_part(self, generation: int, step: int, shard: int, shards: int, tensors: Mapping[str, Tensor],
                   ledger: str = "") -> Part:
        """Writes one shard's file and returns its record. Safe to call again: the same content replaces itself."""
        from safetensors.torch import save

        data = save(dict(tensors), metadata={"ledger": ledger, "generation": str(generation), "step": str(step)})
        name = f"{directory_name(generation, step)}/shard-{shard}-of-{shards}.safetensors"
        write_atomically(self.root / name, data)
        return Part(shard, name, hashlib.sha256(data).hexdigest(), len(data))

    def write_manifest(self, manifest: Manifest) -> None:
        data = json.dumps(manifest.to_json(), indent=1, sort_keys=True).encode()
        write_atomically(self.root / manifest.directory / "manifest.json", data)

    def read_manifest(self, directory: str) -> Manifest:
        """Raises DamagedCheckpoint when the manifest is missing or no manifest, or names a file that is not there."""
        path = self.root / directory / "manifest.json"
        try:
            manifest = Manifest.from_json(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(f"checkpoint {path.parent} has no usable manifest: {error}", rule="checkpoint",
                                    help="an older checkpoint is used instead; delete this folder") from error
        for part in manifest.parts:
            size = (self.root / part.file).stat().st_size if (self.root / part.file).exists() else -1
            if size != part.bytes:
                raise DamagedCheckpoint(f"{self.root / part.file}: expected {part.bytes} bytes, found {max(size, 0)}",
                                        rule="checkpoint", help="an older checkpoint is used instead")
        return manifest

    def read_part(self, manifest: Manifest, shard: int) -> tuple[dict[str, Tensor], str]:
        """One shard's tensors and ledger, after checking the file's checksum. Raises DamagedCheckpoint."""
        from safetensors import safe_open

        part = next((p for p in manifest.parts if p.shard == shard), None)
        if part is None:
            raise DamagedCheckpoint(f"checkpoint {manifest.directory} has no part of shard {shard}", rule="checkpoint",
                                    help="was the number of pservers changed? start with the number it was saved with")
        path = self.root / part.file
        try:
            found = _sha256(path)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}", rule="checkpoint",
                                    help="an older checkpoint is used instead") from error
        if found != part.sha256:
            raise DamagedCheckpoint(f"{path}: its checksum is {found[:12]}..., the manifest says {part.sha256[:12]}...",
                                    rule="checkpoint", help="an older checkpoint is used instead")
        with safe_open(path, framework="pt") as file:
            return {k: file.get_tensor(k) for k in file.keys()}, file.metadata().get("ledger", "")  # noqa: SIM118

    def manifests(self) -> list[Manifest]:
        """Usable checkpoints, newest (by step, then generation) first. Damaged ones are left out."""
        found = []
        for directory in self._directories():
            try:
                found.append(self.read_manifest(directory))
            except DamagedCheckpoint:
                continue
        return found

    def prune(self, keep: int, last_good: Manifest) -> None:
        """Deletes checkpoints older than the newest `keep`, and leftovers; never `last_good` nor anything newer."""
        kept = 0
        for directory in self._directories():
            key = _key(directory)
            if key >= (last_good.step, last_good.generation):
                kept += key == (last_good.step, last_good.generation)
            elif (self.root / directory / "manifest.json").exists() and kept < keep:
                kept += 1
            else:
                shutil.rmtree(self.root / directory, ignore_errors=True)

    def _directories(self) -> list[str]:
        names = [p.name for p in self.root.iterdir()] if self.root.is_dir() else []
        return sorted((n for n in names if _DIRECTORY.fullmatch(n)), key=_key, reverse=True)


def _key(directory: str) -> tuple[int, int]:
    match = _DIRECTORY.fullmatch(directory)
    assert match is not None
    return int(match[1]), int(match[2])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(
            file.read()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `path` so that it holds the old or the new content, whenever the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
