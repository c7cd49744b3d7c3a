"""Files in a run's folder for its user: the discarded records, the results of validations; and an epoch's means, of the
table of metrics there.

    discarded.jsonl    once the job is complete
    validation.jsonl   a line for each validation; of a step that was validated twice the newest counts
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from graphft.disk.fileio import write_atomically
from graphft.errors import GraphftError, listed
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import PassMetrics, Validated, decode
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import EtcdError, Store
from graphft.runtime.process.metric_table import read_rows
from graphft.runtime.protocol.chunk_queue import Discards, positions_of

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

log = logging.getLogger("graphft")

DISCARDED, VALIDATIONS = "discarded.jsonl", "validation.jsonl"


# -- discarded records ------------------------------------------------------------------------------------------------


class Discarded(msgspec.Struct, frozen=True):
    """Records that are discarded since a batch (local accumulation: unit) of the chunk failed, with this error the last
    time: of that batch's pass and of all later ones. `records`: their numbers in the data, ascending."""

    pass_index: int
    chunk: int
    batch: int
    records: tuple[int, ...]
    reason: str


def discarded_of(config: JobConfig, discarded: Mapping[int, Discards]) -> tuple[Discarded, ...]:
    """Returns them in the order of passes, chunks and batches. `discarded`: by chunk, as etcd has it."""
    found, first_records = [], config.data.first_records()
    for chunk, record in discarded.items():
        start = first_records[chunk]
        for discard in record.discards:
            positions = sorted(positions_of(config.plan, chunk, discard))
            numbers = tuple(start + position for position in positions)
            found.append(Discarded(discard.pass_index, chunk, discard.batch, numbers, discard.reason))
    return tuple(sorted(found, key=lambda d: (d.pass_index, d.chunk, d.batch)))


def write_discarded(job_dir: Path, found: Sequence[Discarded]) -> None:
    if found:
        write_atomically(job_dir / DISCARDED, b"".join(msgspec.json.encode(one) + b"\n" for one in found))
    else:
        (job_dir / DISCARDED).unlink(missing_ok=True)


def read_discarded(job_dir: Path) -> tuple[Discarded, ...]:
    try:
        return tuple(msgspec.json.Decoder(Discarded).decode_lines((job_dir / DISCARDED).read_bytes()))
    except FileNotFoundError:
        return ()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GraphftError(f"{job_dir / DISCARDED} is damaged: {error}", rule="load") from error


def describe_discarded(found: Sequence[Discarded], total: int, where: str = f"Result.discarded, {DISCARDED}") -> str:
    """Returns one line; "" for nothing. `total`: records of the data. `where` the whole list is."""
    if not found:
        return ""
    numbers = sorted({number for one in found for number in one.records})
    first = found[0]
    return (
        f"{len(numbers)} of {total} records were DISCARDED, as their batches failed: {listed(numbers)}; the first in "
        f"chunk {first.chunk}: {first.reason} (all of them: {where})"
    )


# -- validations ------------------------------------------------------------------------------------------------------


class ValidationRow(msgspec.Struct, frozen=True):
    """The result of validating the model after `step` steps, when `epoch` epochs were done; without NaN."""

    epoch: int
    step: int
    metrics: dict[str, float]


def note_validation(
    job_dir: Path, epoch: int, step: int, metrics: Mapping[str, float], at: float | None = None
) -> None:
    """Notes what `Validation.run` returned, `at` now by default. Never raises: a full disk must not end a training."""
    found = {name: value for name, value in metrics.items() if name != "samples"}
    values = {name: value if math.isfinite(value) else str(value) for name, value in found.items()}
    row = {"epoch": epoch, "step": step, "metrics": values, "at": round(time.time() if at is None else at, 3)}
    try:
        with (job_dir / VALIDATIONS).open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
    except OSError as error:
        log.warning("a validation cannot be noted in %s: %s", job_dir / VALIDATIONS, error)


def read_validations(job_dir: Path) -> dict[int, ValidationRow]:
    """Returns them by step, in order; without lines that the disk did not take whole."""
    found: dict[int, ValidationRow] = {}
    with contextlib.suppress(OSError):
        for line in (job_dir / VALIDATIONS).read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                row = msgspec.json.decode(line, type=ValidationRow, strict=False)  # "inf" is text there
                metrics = {name: value for name, value in row.metrics.items() if not math.isnan(value)}
                found[row.step] = ValidationRow(row.epoch, row.step, metrics)
    return dict(sorted(found.items()))


def take_validations(etcd: Store, keys: Keys, job_dir: Path) -> None:
    """Notes each in etcd that the folder does not have; may be repeated. Raises EtcdError."""
    known = read_validations(job_dir)
    for kv in etcd.range(keys.all_validated).kvs:
        one = msgspec.json.decode(kv.value, type=Validated)
        values, before = {name: float(value) for name, value in one.means.items()}, known.get(one.step)
        if before is None or before.metrics != {n: v for n, v in values.items() if not math.isnan(v)}:
            note_validation(job_dir, one.epoch, one.step, values, one.at)


class TakenValidations:
    """Takes them while a launch runs."""

    def __init__(self, job_dir: Path, etcd: Store, keys: Keys, config: JobConfig) -> None:
        self.job_dir, self._etcd, self._keys, self._config = job_dir, etcd, keys, config
        self._newest: object = ...  # none was seen so far

    def look(self, status: JobStatus | None) -> None:
        """Takes them if there is a new one since the last look; without a status, at the end, in any case."""
        if self._config.validate is None or (status is not None and status.validated == self._newest):
            return
        with contextlib.suppress(EtcdError):  # the next look is soon
            take_validations(self._etcd, self._keys, self.job_dir)
            self._newest = status.validated if status is not None else None


# -- the means of an epoch --------------------------------------------------------------------------------------------


def epoch_of_table(job_dir: Path, config: JobConfig, epoch: int) -> PassMetrics:
    """Returns the means over the rows of an epoch (from 0), in their order. Raises OSError, ValueError where the table
    cannot be read."""
    starts = config.plan.start_steps
    begin, end = starts[epoch], starts[epoch + 1]
    rows = read_rows(job_dir, begin, end - begin) if config.sync else read_rows(job_dir)
    there = rows.data[(rows.at > 0) & (rows.data["step"] >= begin) & (rows.data["step"] < end)]
    samples, means = rows.means(starts)
    found = {name: float(mean[epoch]) for name, mean in means.items()}
    return PassMetrics(
        int(samples[epoch]),
        {name: mean if np.isfinite(mean) else str(mean) for name, mean in found.items()},
        end - begin - len(there) if config.sync else int(np.count_nonzero(rows.at == 0)),
        *((float(there["at"].min()), float(there["at"].max())) if len(there) else ()),
    )


def recorded_epoch(etcd: Store, keys: Keys, epoch: int) -> PassMetrics | None:
    """Returns shard 0's record of an epoch (from 0); None while etcd does not tell."""
    try:
        return decode(etcd.get(keys.pass_metrics(epoch)), PassMetrics)
    except EtcdError:
        return None
