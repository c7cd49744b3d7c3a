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

CODE = "module@CODE"
HELD_OUT = "validation: "
"""Before the names of digests that are of the data which is validated with."""

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.ir import Program

DIGEST_BYTES = 8


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


def held_out(name: str) -> str:
    """What a digest of data that is validated with is called, beside those of the data that is trained on."""
    return f"{HELD_OUT}{name}"


def digest_of(digests: Mapping[str, str]) -> str:
    """One digest of several, by name."""
    text = "".join(f"{name}\n{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * DIGEST_BYTES]


def without_lines(program: Program) -> Program:
    """The program without the lines of the user's script that its assumptions come from: a comment moves them."""
    if "assume" not in program.attrs:
        return program
    bare = program.clone()
    bare.attrs["assume"] = tuple(condition for condition, _ in program.attrs["assume"])
    return bare


def program_digest(program: Program) -> str:
    """Of the text of one program: the same wherever and whenever it is made."""
    return hashlib.sha256(str(without_lines(program)).encode()).hexdigest()[: 2 * DIGEST_BYTES]


def drawn_without_seed() -> bool:
    """Whether torch's generator still has the seed that torch gave it: 53 random bits, which no one chooses."""
    import torch

    return torch.initial_seed() >= 1 << 32


def fingerprint_values(programs: Mapping[str, Program]) -> dict[str, str]:
    """A digest of every initial value that the programs hold, by variable; of pickled code, which is not the same bytes
    each time, the op's `source` tells."""
    return {
        name: _digest(value)
        for program in programs.values()
        for name, value in program.values.items()
        if name != CODE or program.find_op("eager_step") is None
    }


def _digest(tensor: Tensor) -> str:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.blake2b(f"{tensor.dtype}{list(tensor.shape)}".encode(), digest_size=DIGEST_BYTES)
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()
