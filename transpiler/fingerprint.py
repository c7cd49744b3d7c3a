"""What makes one run of a job that run and no other.

A run is made where its folder is made: it gets a random id there, and its programs, its options, its data and its
initial values are what they are then. The id stands in the folder, in etcd and in what its processes say to each other.
The fingerprints tell a script that is run again from one that was changed in between.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.ir import Program
    from graphft.transpiler.config import JobConfig

DIGEST_BYTES = 8
LISTED = 3
"""Differences of one kind that are named; of more, their number is told."""


def new_run() -> str:
    """The id of a run that begins now."""
    return uuid.uuid4().hex[:16]


@dataclass(frozen=True)
class Fingerprint:
    """Digests of what a job is made of. `program`: its programs and options (`Job.hash`); `data`: by column or file;
    `values`: initial values of parameters, buffers and optimizer state, frozen values and constants, by variable."""

    program: str
    data: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    unseeded: bool = field(default=False, compare=False)
    """Whether torch's generator had no seed of the script's: then each of its processes draws other initial values."""

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Fingerprint:
        return Fingerprint(str(data["program"]), dict(data["data"]), dict(data["values"]), bool(data["unseeded"]))


def drawn_without_seed() -> bool:
    """Whether torch's generator still has the seed that torch gave it: 53 random bits, which no one chooses."""
    import torch

    return torch.initial_seed() >= 1 << 32


def fingerprint_values(programs: Mapping[str, Program]) -> dict[str, str]:
    """A digest of every initial value that the programs hold, by variable."""
    return {name: _digest(value) for program in programs.values() for name, value in program.values.items()}


def _digest(tensor: Tensor) -> str:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=DIGEST_BYTES)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def differences(old: Fingerprint, new: Fingerprint, old_config: JobConfig, new_config: JobConfig) -> list[str]:
    """How a job differs from an earlier one, in words; [] if it is the same."""
    found = _options(old_config, new_config) if old.program != new.program else []
    if old.program != new.program and not found:
        found = ["the programs"]
    return found + _named("data", old.data, new.data) + _named("initial value of", *_whole(old.values, new.values))


def _options(old: JobConfig, new: JobConfig) -> list[str]:
    before, after = old.hashed(), new.hashed()
    return [
        f"{k} {before.get(k)!r} -> {after.get(k)!r}" if k != "data" else "how the data is described"
        for k in after
        if before.get(k) != after.get(k)
    ]


def _whole(*values: Mapping[str, str]) -> list[dict[str, str]]:
    """Digests by variable of the user's program: the slices of one count as one."""
    merged: list[dict[str, str]] = []
    for digests in values:
        by_name: dict[str, str] = {}
        for name in sorted(digests):
            whole = name.split("@slice")[0]
            by_name[whole] = by_name.get(whole, "") + digests[name]
        merged.append(by_name)
    return merged


def _named(kind: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    more = [f"{len(names) - LISTED} more"] if len(names) > LISTED else []
    return [f"{kind} {', '.join([*names[:LISTED], *more])}"] if names else []
