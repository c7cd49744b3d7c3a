"""Up to where the callbacks of a run were called, for the script that goes on: `callbacks.json` in the run's folder.

It is written after the calls: a script that is killed in between repeats the last of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from graphft.disk.fileio import NotRegular, read_regular, write_atomically
from graphft.disk.sealed_json import parse_json
from graphft.errors import UsageError

FILE = "callbacks.json"


@dataclass(frozen=True)
class Cursor:
    """`step`: steps before this one were told by `on_step`; `epoch`: so many epochs by `on_epoch`; `validation`: those
    until this one by `on_validation`."""

    run: str
    step: int = 0
    epoch: int = 0
    validation: int = 0

    @staticmethod
    def read(job_dir: Path, run: str, steps: int, epochs: int) -> Cursor:
        """Nothing, if nothing was told so far. `steps`, `epochs`: of the whole run. Raises UsageError for a file that
        is damaged, OSError."""
        path = job_dir / FILE
        if not path.exists():
            return Cursor(run)
        try:
            found = parse_json(read_regular(path))
            told = Cursor(str(found["run"]), int(found["step"]), int(found["epoch"]), int(found.get("validation", 0)))
        except (ValueError, KeyError, TypeError, OverflowError, IsADirectoryError, NotRegular) as error:
            raise _damaged(path, repr(error)) from None
        if told.run != run:
            return Cursor(run)  # the folder was another run's
        if not (0 <= told.step <= steps and 0 <= told.epoch <= epochs and 0 <= told.validation <= max(steps, epochs)):
            raise _damaged(path, f"step {told.step} of {steps}, epoch {told.epoch} of {epochs}")
        return told

    def write(self, job_dir: Path) -> None:
        """Raises OSError."""
        write_atomically(job_dir / FILE, json.dumps(asdict(self)).encode())


def _damaged(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} does not say what callbacks were told ({why})",
        rule="callbacks",
        help="delete it: then they are told of all of the run's steps and epochs again",
    )
