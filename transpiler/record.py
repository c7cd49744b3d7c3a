"""What a job's folder says of itself, without its programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphft.disk.fileio import read_regular
from graphft.disk.sealed_json import parse_json
from graphft.errors import GraphftError, UsageError
from graphft.transpiler.config import JobConfig
from graphft.transpiler.fingerprint import Fingerprint

FORMAT = 4
"""Of the job's folder; raised when an older graphft could not read it."""
RECORD, MARKER = "job.json", "storage.json"
VALIDATION = "validation"
"""Folder of what it validates with, if it does."""
PREDICTION = "prediction"
"""Folder of the program to predict with, if it has one."""
NO_PREDICTION = "no-prediction.txt"
"""Why it has none."""
SAVED = ("source", "programs", "data", VALIDATION, PREDICTION, NO_PREDICTION, MARKER)
"""What `Job.save` writes beside the record. The marker says where the job's storage is, if it has one."""


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
    try:
        record = parse_json(read_regular(folder / RECORD))
    except (FileNotFoundError, NotADirectoryError):
        what = "is no job's folder: it has no job.json" if folder.is_dir() else "is no folder"
        raise UsageError(
            f"cannot load a job: {folder} {what}",
            rule="job-directory",
            help="give the folder that Job.save or graphft launch wrote",
        ) from None
    except OSError as error:  # it is there, or may be: taking it for nothing would start over
        raise GraphftError(
            f"{folder / 'job.json'} cannot be read: {error}",
            rule="storage",
            help="see whether the file system is mounted and healthy, and whether you may read it",
        ) from error
    except ValueError as error:
        raise GraphftError(
            f"{folder / 'job.json'} is damaged: {error}", rule="load", help="transpile and save the job again"
        ) from error
    if (
        not isinstance(record, dict)
        or record.get("format") != FORMAT
        or not ({"run", "fingerprint", "config"} <= record.keys())
    ):
        raise GraphftError(
            f"{folder / 'job.json'} is of another format than this graphft's ({FORMAT})",
            rule="load",
            help="use the graphft that saved the job, or transpile it again",
        )
    return JobRecord(
        JobConfig.from_json(record["config"]), str(record["run"]), Fingerprint.from_json(record["fingerprint"])
    )
