"""Checkpoints on a file system: numbered, checksummed, existing wholly or not at all.

    <root>/step-00000050.g2/shard-0-of-2.safetensors      one file per shard, written by that shard
                            shard-1-of-2.safetensors
                            manifest.json                 last: the checkpoint exists from here on

Every file is written under a temporary name, fsynced and renamed. Which checkpoint is *committed* is decided in
etcd (`runtime.commit`); what lies here is only what a commit may name. No pickle: safetensors and JSON.

A manifest is checked against the sizes of its files, a part against its checksum when it is read: whoever finds a
checkpoint damaged uses the one before.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError
from graphft.fileio import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

_DIRECTORY = re.compile(r"step-(\d+)\.g(\d+)")
_OLDER = "an older checkpoint is used instead"


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

    def write_part(self, generation: int, step: int, shard: int, shards: int, tensors: Mapping[str, Tensor],
                   ledger: str = "") -> Part:
        """Writes one shard's file and returns its record. Safe to call again: the same bytes replace themselves."""
        data = to_bytes(tensors, ledger)
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
                                    help=f"{_OLDER}; delete this folder") from error
        if manifest.directory != directory:
            raise DamagedCheckpoint(f"{path} is the manifest of {manifest.directory}", rule="checkpoint",
                                    help=f"{_OLDER}; give the folder its name back")
        for part in manifest.parts:
            size = _size(self.root / part.file)
            if size != part.bytes:
                found = "it is missing" if size is None else f"found {size}"
                raise DamagedCheckpoint(f"{self.root / part.file}: expected {part.bytes} bytes, {found}",
                                        rule="checkpoint", help=_OLDER)
        return manifest

    def read_part(self, manifest: Manifest, shard: int) -> tuple[dict[str, Tensor], str]:
        """One shard's tensors and ledger, after checking the file's checksum. Raises DamagedCheckpoint."""
        part = next((p for p in manifest.parts if p.shard == shard), None)
        if part is None:
            raise DamagedCheckpoint(f"checkpoint {manifest.directory} has no part of shard {shard}", rule="checkpoint",
                                    help="was the number of pservers changed? start with the number it was saved with")
        from safetensors import safe_open

        path = self.root / part.file
        try:
            found = _sha256(path)
            if found != part.sha256:
                raise DamagedCheckpoint(f"{path}: its checksum is {found[:12]}..., the manifest says "
                                        f"{part.sha256[:12]}...", rule="checkpoint", help=_OLDER)
            with safe_open(path, framework="pt") as file:
                return {k: file.get_tensor(k) for k in file.keys()}, file.metadata().get("ledger", "")  # noqa: SIM118
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}", rule="checkpoint", help=_OLDER) from error

    def manifests(self) -> list[Manifest]:
        """Usable checkpoints, newest (by step, then generation) first. Damaged ones are left out."""
        found = []
        for directory in self._directories():
            try:
                found.append(self.read_manifest(directory))
            except DamagedCheckpoint:
                continue
        return found

    def latest_generation(self) -> int:
        """The highest generation that has left anything here; -1 if none has."""
        return max((_key(d)[1] for d in self._directories()), default=-1)

    def age(self, directory: str) -> float:
        """Seconds since this checkpoint was written, also if a process before this one did; endless if it is gone."""
        return age_of(self.root / directory / "manifest.json")

    def prune(self, keep: int, last_good: Manifest) -> None:
        """Deletes what is older than the newest `keep` usable checkpoints: older ones, and what crashes left behind.

        Never `last_good`, nor anything of a later step or generation, which may be being written.
        """
        kept = 0
        for directory in self._directories():
            step, generation = _key(directory)
            if (step, generation) == (last_good.step, last_good.generation):
                kept += 1
            elif step >= last_good.step or generation > last_good.generation:
                continue
            elif kept < keep and self._usable(directory):
                kept += 1
            else:
                shutil.rmtree(self.root / directory, ignore_errors=True)

    def _usable(self, directory: str) -> bool:
        try:
            self.read_manifest(directory)
        except DamagedCheckpoint:
            return False
        return True

    def _directories(self) -> list[str]:
        names = [p.name for p in self.root.iterdir()] if self.root.is_dir() else []
        return sorted((n for n in names if _DIRECTORY.fullmatch(n)), key=_key, reverse=True)


def age_of(path: Path) -> float:
    """Seconds since a file was written, by the file system's clock and this machine's; endless if it is not there."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return float("inf")


def _key(directory: str) -> tuple[int, int]:
    match = _DIRECTORY.fullmatch(directory)
    assert match is not None
    return int(match[1]), int(match[2])


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def to_bytes(tensors: Mapping[str, Tensor], ledger: str | None = None) -> bytes:
    """The tensors as a safetensors file. Those that share memory (tied weights, views) are each written whole.

    The same tensors give the same bytes: hence one entry of metadata, as safetensors writes several in any order.
    """
    import torch
    from safetensors.torch import save

    storages = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    own = {n: t.contiguous() if storages[t.untyped_storage().data_ptr()] == 1 else t.clone(
        memory_format=torch.contiguous_format) for n, t in tensors.items()}
    return save(own, metadata={"ledger": ledger} if ledger is not None else None)
