"""What a checkpoint consists of, and the name of its folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from graphft.block_deltas import FileEntry
from graphft.sealed_json import seal, unseal

SOURCE = "from"
"""In `meta["made"]`: which checkpoint of which run this one was made of."""
VALIDATE = "validate"
"""In `meta`: true of a checkpoint whose model is to be validated."""
DECIDED = "decided"
"""In `meta`: what followed from the validations until then, if something does."""
_DIRECTORY = re.compile(r"step-(\d+)\.g(\d+)")
_FILE = re.compile(r"(shard-\d+/)?step-\d+\.g\d+/shard-\d+-of-\d+(\.[0-9a-f]+)?\.safetensors")


class Part(msgspec.Struct, frozen=True):
    """One shard's file of a checkpoint. `file` is relative to the store's root; what `entry` needs, to the shard's."""

    shard: int
    file: str
    entry: FileEntry

    @property
    def root(self) -> str:
        """Of the shard's checkpoints, from the store's root on: "shard-0/" in the last manifest of an async job."""
        return self.file.removesuffix("/".join(self.file.split("/")[-2:]))

    def files(self) -> dict[str, int]:
        """All that it consists of, relative to the store's root, and their sizes."""
        return {self.root + name: size for name, size in self.entry.needs.items()} | {self.file: self.entry.bytes}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of. `step` is the version of the parameters in it, `run` the run that it is of.

    `meta["made"]`: when (Unix seconds), where, and by which versions of what."""

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
        """Of its own files."""
        return sum(part.entry.bytes for part in self.parts)

    def files(self) -> dict[str, int]:
        """All that it consists of, and their sizes."""
        return {name: size for part in self.parts for name, size in part.files().items()}


def encode_manifest(manifest: Manifest) -> bytes:
    return seal(msgspec.to_builtins(manifest))


def decode_manifest(data: bytes) -> Manifest:
    """Raises ValueError unless `data` is what `encode_manifest` gives."""
    manifest = msgspec.convert(unseal(data), Manifest)
    for name in manifest.files():
        if not _FILE.fullmatch(name):
            raise ValueError(f"it names the file {name!r}")
    return manifest


def directory_name(generation: int, step: int) -> str:
    return f"step-{step:08d}.g{generation}"


def directory_key(directory: str) -> tuple[int, int]:
    """Step and generation of a checkpoint's folder."""
    match = _DIRECTORY.fullmatch(directory)
    assert match is not None
    return int(match[1]), int(match[2])


def newest_first(names: Iterable[str]) -> list[str]:
    """Those of them that name folders of checkpoints."""
    return sorted((n for n in names if _DIRECTORY.fullmatch(n)), key=directory_key, reverse=True)
