"""What a job's validations come to, taken from etcd into the run's folder, each once."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.coordination.taken_validations import take_validations
from graphft.runtime.etcd import EtcdError, Store
from graphft.runtime.process.validations import read_validations

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig

LISTED = 5
"""Steps that a line names."""


class TakenValidations:
    """Of one launch. Several launches of a run write the same."""

    def __init__(self, job_dir: Path, etcd: Store, keys: Keys, config: JobConfig) -> None:
        self.job_dir, self._etcd, self._keys, self._config = job_dir, etcd, keys, config
        self._newest: Validated | None = None
        self._begun = False

    def look(self, status: JobStatus | None) -> None:
        """At what is new since the last look; at all, without a status, at the end."""
        if self._config.validate is None or (status is not None and self._begun and status.validated == self._newest):
            return
        with contextlib.suppress(EtcdError):  # the next look is soon
            take_validations(self._etcd, self._keys, self.job_dir)
            self._begun = True
            self._newest = status.validated if status is not None else None


def missing_validations(job_dir: Path, config: JobConfig, steps: int) -> list[str]:
    """A line that says which validations a job lacks that was complete after so many steps, if it lacks some."""
    lacking = sorted({step for step in config.validated if step <= steps} - read_validations(job_dir).keys())
    if not lacking:
        return []
    more = f" and {len(lacking) - LISTED} more" * (len(lacking) > LISTED)
    return [f"the validations of steps {', '.join(map(str, lacking[:LISTED]))}{more} are MISSING"]
