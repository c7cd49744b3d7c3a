"""What a checkpoint consists of, and the name of its folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from graphft.disk.sealed_json import seal, unseal

LOOP = -1
"""The generation of a training loop's checkpoints: they have none."""
_DIRECTORY = re.compile(r"step-(\d{8,})\.g(\d+)|checkpoint-(\d{8,})")
_FILE = re.compile(rf"(shard-\d+/)?({_DIRECTORY.pattern})/shard-\d+-of-\d+\.[0-9a-f]+\.safetensors")


class Part(msgspec.Struct, frozen=True):
    """One shard's file of a checkpoint: its name relative to the store's root, its size, its header's checksum."""

    shard: int
    file: str
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Says what a checkpoint consists of. `step` is the version of the parameters in it (of a loop, the version's
    number), `run` the run that it is of. `meta["made"]`: when (Unix seconds), where, and by which versions of what."""

    generation: int
    step: int
    run: str
    parts: tuple[Part, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        return directory_name(self.generation, self.step)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def encode_manifest(manifest: Manifest) -> bytes:
    return seal(msgspec.to_builtins(manifest))


def decode_manifest(data: bytes) -> Manifest:
    """Raises ValueError unless `data` is what `encode_manifest` gives."""
    manifest = msgspec.convert(unseal(data), Manifest)
    for part in manifest.parts:
        if not _FILE.fullmatch(part.file):
            raise ValueError(f"it names the file {part.file!r}")
    return manifest


def directory_name(generation: int, step: int) -> str:
    return f"checkpoint-{step:08d}" if generation == LOOP else f"step-{step:08d}.g{generation}"


def is_directory(name: str) -> bool:
    return _DIRECTORY.fullmatch(name) is not None


def directory_key(directory: str) -> tuple[int, int]:
    """Returns step and generation of a checkpoint's folder."""
    match = _DIRECTORY.fullmatch(directory)
    if match is None:
        raise ValueError(f"{directory} is no folder of a checkpoint")
    return (int(match[3]), LOOP) if match[3] else (int(match[1]), int(match[2]))
