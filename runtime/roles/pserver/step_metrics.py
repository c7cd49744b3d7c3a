"""Loss and metrics of the steps that shard 0 applies: rows of the job's table, and records of the epochs in etcd."""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from graphft.runtime.coordination.job_files import fetch_metrics, put_metrics
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.result_files import epoch_of_table
from graphft.runtime.etcd import EtcdError
from graphft.runtime.process.metric_table import TableWriter
from graphft.runtime.protocol.round import Contribution

UPLOAD_PART = 0.05
"""Uploads of the table, which is one file, take at most this part of the time."""


class StepMetrics:
    """`names`: of the reported values; `version`: the shard's, so many rows there are. `newest`: of the newest step."""

    def __init__(self, member: Member, job_dir: Path, names: Sequence[str], version: int) -> None:
        self.member, self.job_dir, self.names = member, job_dir, tuple(names)
        self.newest: dict[str, float] = {}
        with contextlib.suppress(OSError):  # then the rows are lacking: nothing else depends on them
            fetch_metrics(job_dir)
        self._table = TableWriter(job_dir, names, version)
        self._next_upload = 0.0
        self._recorded: int | None = None
        """Epochs that etcd knows. A process that begins tells the newest one again."""

    def add(self, step: int, contributions: Sequence[Contribution], applied: bool = True) -> None:
        """Adds the row of a step: of contributions in slot order, which are not `applied` if it is discarded."""
        told = [one for one in contributions if one.values]
        weights = [one.samples for one in told]
        samples = sum(weights)
        values = told[0].values if told else (math.nan,) * len(self.names)
        if len(told) > 1:
            columns = zip(*(one.values for one in told), strict=True)
            values = tuple(sum(map(operator.mul, column, weights)) / samples for column in columns)
        self._table.append(step, samples if applied else -samples, values)
        if told:
            self.newest = dict(zip(self.names, values, strict=True))

    def cut(self, version: int) -> None:
        """The shard has gone back to this version."""
        self._table.cut(version)
        self._recorded = None

    def record(self, over: int) -> None:
        """Tells etcd of the epochs that are over. Called now and then: it goes on where etcd did not answer."""
        if self._table.waiting:
            self._table.write()
        recorded = max(0, over - 1) if self._recorded is None else min(self._recorded, over)
        while recorded < over and not self._table.waiting:
            try:
                found = epoch_of_table(self.job_dir, self.member.config, recorded)
                self.member.etcd.put(self.member.keys.pass_metrics(recorded), msgspec.json.encode(found))
            except (EtcdError, OSError, ValueError):
                break
            recorded += 1
        self._recorded = recorded

    def sync(self) -> None:
        """Returns when the rows so far are on the disk, and mostly in the storage: a checkpoint that has these steps
        follows. Called by the saver's thread. Raises OSError."""
        self._table.sync()
        began = time.monotonic()
        if began >= self._next_upload:
            with contextlib.suppress(OSError):  # a later one has all
                put_metrics(self.job_dir)
            self._next_upload = began + (time.monotonic() - began) / UPLOAD_PART

    def close(self) -> None:
        self._table.close()
