"""What a trainer notes of each batch, for people: a file of JSON lines in the job's folder."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("graphft")


class Metrics:
    """Appends rows to a file. A row that the disk does not take is lost, and the log says so: training goes on."""

    def __init__(self, path: Path) -> None:
        self.path, self.lost = path, 0
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
            if self.lost & (self.lost - 1) == 0:  # the 1st, 2nd, 4th, 8th ... time
                log.warning("a row of %s is lost, the %d. so far: %s", self.path, self.lost, error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
