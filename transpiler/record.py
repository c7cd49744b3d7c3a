"""Reads and writes what a job's folder says of itself, without its programs: options, run, fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.disk.sealed_json import parse_json
from graphft.errors import GraphftError, UsageError
from graphft.transpiler.config import JobConfig

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.ir import Program

FORMAT = 5
"""Number of the folder's format; raised when another graphft could not read it."""
RECORD, MARKER = "job.json", "storage.json"
VALIDATION = "validation"
"""Folder of what it validates with, if it does."""
PREDICTION = "prediction"
"""Folder of the program to predict with, if it has one."""
SAVED = ("source", "programs", "data", VALIDATION, PREDICTION, MARKER)
"""Files that `Job.save` writes beside the record. The marker says where the job's storage is, if it has one."""
CODE = "module@CODE"
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Fingerprint:
    """Digests of what a job is made of. `program`: its programs and options (`Job.hash`); `data`: by column or file;
    `values`: initial values of parameters, buffers and optimizer state, frozen values and constants, by variable."""

    program: str
    data: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    unseeded: bool = field(default=False, compare=False)
    """True if torch's generator had no seed of the script's: then each of its processes draws other initial values."""


def without_lines(program: Program) -> Program:
    """Returns the program without the lines of the script that its assumptions come from: a comment moves them."""
    if "assume" not in program.attrs:
        return program
    bare = program.clone()
    bare.attrs["assume"] = tuple(condition for condition, _ in program.attrs["assume"])
    return bare


def drawn_without_seed() -> bool:
    """True if torch's generator still has the seed that torch gave it: 53 random bits, which no one chooses."""
    import torch

    return torch.initial_seed() >= 1 << 32


def fingerprint_values(programs: Mapping[str, Program]) -> dict[str, str]:
    """Returns a digest of every initial value that the programs hold, by variable; but for pickled code, which is not
    the same bytes each time: the op's `source` tells."""
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


@dataclass(frozen=True)
class JobRecord:
    """The options of a saved job, the id of its run, and what it is made of: enough to start its roles.

    Reading it takes neither torch nor time."""

    config: JobConfig
    run_id: str
    fingerprint: Fingerprint

    @property
    def hash(self) -> str:
        return self.fingerprint.program


def read_record(folder: Path) -> JobRecord:
    """Raises GraphftError for a folder that is missing, damaged or no job's."""
    path = folder / RECORD
    try:
        record = parse_json(path.read_bytes())
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            text = f"{path} is of another format than this graphft's ({FORMAT})"
            raise GraphftError(text, rule="load", help="use the graphft that saved the job, or transpile it again")
        config, fingerprint = JobConfig.from_json(record["config"]), Fingerprint(**record["fingerprint"])
        return JobRecord(config, str(record["run"]), fingerprint)
    except (FileNotFoundError, NotADirectoryError):
        what = f"is no job's folder: it has no {RECORD}" if folder.is_dir() else "is no folder"
        help = "give the folder that Job.save or graphft launch wrote"
        raise UsageError(f"cannot load a job: {folder} {what}", rule="job-directory", help=help) from None
    except OSError as error:  # it is there, or may be: taking it for nothing would start over
        help = "see whether the file system is mounted and healthy, and whether you may read it"
        raise GraphftError(f"{path} cannot be read: {error}", rule="storage", help=help) from error
    except (ValueError, KeyError, TypeError) as error:
        help = "transpile and save the job again"
        raise GraphftError(f"{path} is damaged: {error!r}", rule="load", help=help) from error
