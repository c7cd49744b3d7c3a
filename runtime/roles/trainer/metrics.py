"""What a trainer notes of each batch, for people: a file of JSON lines in the job's folder."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphft.errors import ordinal


class Metrics:
    """Appends rows to a file. A row that the disk does not take is lost: training goes on.

    `tell` gets the number of those that are lost, and why, with the 1st, 2nd, 4th, 8th ... of them, and at the end.
    """

    def __init__(self, path: Path, tell: Callable[[int, str], object]) -> None:
        self.path, self._tell, self.lost, self._told = path, tell, 0, 0
        self._why = ""
        self._file: io.FileIO | None = None
        self._torn = False

    def write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        try:
            if self._file is None:
                self.path.parent.mkdir(exist_ok=True)
                self._file = self.path.open("ab", buffering=0)  # a reader finds whole rows meanwhile
            line = b"\n" + line if self._torn else line  # what is left of a row is a line of its own
            self._torn = self._file.write(line) != len(line)
            error = "the disk is full" if self._torn else ""
        except OSError as failed:
            error = str(failed)
        if error:
            self.lost += 1
            self._why = error
            if self.lost & (self.lost - 1) == 0:
                self._say()

    def _say(self) -> None:
        if self.lost > self._told:
            self._told = self.lost
            self._tell(self.lost, f"a row of {self.path} is lost, the {ordinal(self.lost)} so far: {self._why}")

    def close(self) -> None:
        self._say()
        if self._file is not None:
            self._file.close()
