"""Weights as Hugging Face saves them: `model.safetensors`, or several files and an index of what lies in which.

model-00001-of-00002.safetensors
model-00002-of-00002.safetensors
model.safetensors.index.json        {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from graphft.disk.fileio import write_atomically
from graphft.disk.tensor_file import read_tensors, write_tensors
from graphft.errors import GraphftError, UsageError

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
"""As `save_pretrained` cuts by default."""


def write_weights(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Writes a folder that `from_pretrained` and `load_into` read; returns its files. Raises OSError; UsageError if the
    folder has weights already. A tensor under several names (tied) is written under the first, as Hugging Face does."""
    if folder.is_dir() and any(folder.glob("*.safetensors*")):
        raise UsageError(f"{folder} has weights already", rule="export", help="give a new folder")
    groups = cut(_untied(tensors), shard_bytes)
    if len(groups) == 1:
        write_tensors(folder / WHOLE, groups[0], {"format": "pt"})
        return [WHOLE]
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(folder / name, group, {"format": "pt"})
        places.update(dict.fromkeys(group, name))
    total = sum(t.nbytes for group in groups for t in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_atomically(folder / INDEX, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
    return [*sorted(set(places.values())), INDEX]


def cut(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """In their order, in groups of at most so many bytes; a tensor that is larger is a group of its own."""
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    return groups


def _untied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known: set[int] = set()
    return {n: t for n, t in tensors.items() if not (id(t) in known or known.add(id(t)))}  # type: ignore[func-returns-value]


def read_sharded(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that an index names. Raises GraphftError[weights] where they are not what it says."""
    try:
        places = dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GraphftError(f"{index} is no index of weights: {error!r}", rule="weights", help=_AGAIN) from error
    wrong = sorted({str(f) for f in places.values() if posixpath.basename(str(f)) != f or not str(f).strip(".")})
    if wrong:
        raise GraphftError(f"{index} names files elsewhere: {', '.join(wrong[:3])}", rule="weights", help=_AGAIN)
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        try:
            tensors, _ = read_tensors(index.parent / file)
        except OSError as error:
            raise GraphftError(
                f"{index} names {file}, which cannot be read: {error}", rule="weights", help=_AGAIN
            ) from error
        found.update({n: t for n, t in tensors.items() if places.get(n) == file})
    missing = sorted(places.keys() - found.keys())
    if missing:
        raise GraphftError(
            f"{index} names {missing[0]} in {places[missing[0]]}, which does not have it"
            + f" (and {len(missing) - 1} more)" * (len(missing) > 1),
            rule="weights",
            help=_AGAIN,
        )
    return found


_AGAIN = "was the folder copied or downloaded wholly?"
