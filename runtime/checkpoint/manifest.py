"""Describes what a checkpoint consists of, the name of its folder, and its metadata.

Most of the metadata are for people; but an etcd that was lost, or restored, is told again of what was discarded.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

import graphft
from graphft.disk.sealed_json import seal, unseal
from graphft.runtime.coordination.result_files import describe_discarded, discarded_of
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import mod_is, put_op
from graphft.runtime.protocol.chunk_queue import Discards

if TYPE_CHECKING:
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.etcd.model import Store
    from graphft.transpiler.config import JobConfig

MADE, SOURCE = "made", "from"
"""Keys in a manifest's metadata: `made` has when (Unix seconds), where, and by which versions it was made, and `from`
which checkpoint of which run, if it was made of one."""
PASSES = "passes"
"""Async: how many passes are wholly in it."""
DISCARDED, SKIPPED = "discarded", "skipped_steps"
"""By chunk, as etcd has it; and how many steps were skipped as not finite, if any were."""
VALIDATE, DECIDED = "validate", "decided"
"""True of a checkpoint whose model is to be validated; what followed from the validations until then."""
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


# -- metadata ---------------------------------------------------------------------------------------------------------


def made(**more: Any) -> dict[str, Any]:
    """Returns when (Unix seconds), where, and by which versions it is made."""
    import torch

    by = {"host": socket.gethostname(), "graphft": graphft.__version__, "torch": str(torch.__version__)}
    return {"at": time.time(), **by, **more}


def recorded(etcd: Store, keys: Keys) -> dict[str, Any]:
    """Returns what etcd knows now to be discarded, for a manifest's metadata. Raises EtcdError."""
    found = read_discards(etcd, keys)
    return {DISCARDED: {str(chunk): msgspec.to_builtins(each) for chunk, each in found.items()}} if found else {}


def skipped_in(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns how many steps a shard with these values has skipped, for a manifest's metadata."""
    from graphft.transpiler.layout import SKIPPED_STEPS

    count = int(values.get(SKIPPED_STEPS, 0))
    return {SKIPPED: count} if count else {}


def lost_so_far(config: JobConfig, manifest: Manifest) -> list[str]:
    """Returns what was skipped and discarded until this checkpoint, in words, a line each."""
    kept = {int(chunk): msgspec.convert(found, Discards) for chunk, found in manifest.meta.get(DISCARDED, {}).items()}
    count = manifest.meta.get(SKIPPED, 0)
    lines = [f"{count} steps were SKIPPED as not finite"] if count else []
    discarded = describe_discarded(discarded_of(config, kept), config.data.records, "graphft checkpoint show")
    return lines + ([discarded] if discarded else [])


def tell_again(etcd: Store, keys: Keys, meta: Mapping[str, Any]) -> None:
    """Has etcd know at least what the checkpoint with this metadata knew. It may be repeated. Raises EtcdError."""
    for chunk, found in meta.get(DISCARDED, {}).items():
        key, kept = keys.discarded(int(chunk)), msgspec.convert(found, Discards)
        while True:
            kv = etcd.get(key)
            known = msgspec.json.decode(kv.value, type=Discards) if kv is not None else Discards()
            if set(kept.discards) <= set(known.discards):
                break
            both = Discards((*kept.discards, *(o for o in known.discards if o not in kept.discards)))
            same = mod_is(key, kv.mod_revision if kv is not None else 0)
            if etcd.txn([same], [put_op(key, msgspec.json.encode(both))], token=key).ok:
                break
