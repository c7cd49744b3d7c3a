"""What a job's validations came to, taken from etcd into the run's folder."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Validated
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.coordination.validations import note_validation, read_validations
from graphft.runtime.etcd import EtcdError, Store

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


def take_validations(etcd: Store, keys: Keys, job_dir: Path) -> None:
    """Each that the folder does not have. It may be repeated, and by several processes. Raises EtcdError."""
    known = read_validations(job_dir)
    for kv in etcd.range(keys.all_validated).kvs:
        one = msgspec.json.decode(kv.value, type=Validated)
        values = {name: float(value) for name, value in one.means.items()}
        before = known.get(one.step)
        if before is None or dict(before.metrics) != {n: v for n, v in values.items() if v == v}:
            note_validation(job_dir, one.epoch, one.step, values, one.at)


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
