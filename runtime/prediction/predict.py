"""`graphft.predict`, and what `graphft predict` does beside: from a job and data to an entry for each record."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphft.devices import find_device
from graphft.errors import UsageError
from graphft.ir import Program
from graphft.option_names import checked_keywords, is_whole
from graphft.runtime.coordination.job_storage import is_url
from graphft.runtime.data import open_reader
from graphft.runtime.execute.finite import nonfinite_rows
from graphft.runtime.interchange.trained_program import Trained, read_trained
from graphft.runtime.launcher.folder_status import find_folder
from graphft.runtime.launcher.own_run import run_of
from graphft.runtime.prediction.batches import check_batch_size, default_size
from graphft.runtime.prediction.given import Fields, describe_data
from graphft.runtime.prediction.pool import Pool, Tell, cores
from graphft.runtime.prediction.work import Work
from graphft.transpiler import Job

log = logging.getLogger("graphft")

NAMED = 3
"""Records that a warning names."""


@checked_keywords
def predict(
    job: str | os.PathLike[str] | Job,
    data: Any,
    *,
    columns: Mapping[str, Fields] | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    step: int | None = None,
    best: bool = False,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> dict[str, Tensor]:
    """What the trained model of `job` predicts of `data`: by result, an entry for each record, in the data's order.

        graphft.predict("jobs/cancer", {"x": x})["output"].argmax(1)
        job.run().predict("new.csv")
        job.predict("new.csv")

    Args:
        job: A job's name or folder, or the URL of its storage. It may be running: its newest checkpoint counts. Or
            what `transpile` returned: its newest run in ./jobs, a complete one if there is any.
        data: Arrays or tensors by input; what `graphft.arrays`, `files` or `dataset` describe; or paths or URLs of
            .csv, .parquet, .jsonl, .npy files, or of one .npz file. Labels are not needed.
        columns: Which fields of the files each input has (default: those that the job was trained with).
        workers: Processes of this machine that share the data (default: as many as the job has trainers, and at most
            the cores). Which of them computes what, and whether some die, does not change a bit.
        batch_size: Records of a forward pass (default: as in training). The bits may depend on it.
        step: Of a checkpoint that is there, instead of the newest weights.
        best: The best model by its validations (`Validation(best=...)`), instead of the newest.
        weights: Others of the same model: whatever `graphft.read_weights` reads; of a Trainer, what `save` wrote.
        device: (default: the job's)

    Raises GraphftError for data that does not fit, and for a job that has no weights or nothing to predict with.
    """
    request = Request.of(job, data, columns, batch_size, step, best, device, weights)
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        work = request.compute(Path(scratch), workers)
        parts = list(results_of(work, request.program))
    return {name: torch.cat([part[name] for part in parts]) for name in request.results}


@dataclass(frozen=True)
class Request:
    """What is to be predicted, and of which data; checked."""

    trained: Trained
    work: Work

    @staticmethod
    def of(
        job: str | os.PathLike[str] | Job,
        data: Any,
        columns: Mapping[str, Fields] | None,
        batch_size: int | None,
        step: int | None,
        best: bool,
        device: str | None,
        weights: str | os.PathLike[str] | None = None,
    ) -> Request:
        where = run_of(job) if isinstance(job, Job) else job
        trained = read_trained(where if is_url(where) else find_folder(os.fspath(where)), step, best, weights)
        config, program = trained.config, trained.program
        size = default_size(program, config.batch_size) if batch_size is None else batch_size
        check_batch_size(program, size)
        size = int(size)  # it may be NumPy's
        _check_device(device or config.device)
        spec = describe_data(program, data, size, columns, config.data)
        return Request(trained, Work(Path(), spec, size, device or config.device, config.threads))

    @property
    def program(self) -> Program:
        return self.trained.program

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(self.program.attrs["extras"])

    def count(self, workers: int | None) -> int:
        """How many work: no more than there are chunks. Raises UsageError."""
        config = self.trained.config
        if not (workers is None or is_whole(workers, 1)):
            raise UsageError(
                f"workers is {workers!r}, expected a number, 1 or more", rule="option", help="leave it out"
            )
        wanted = workers if workers is not None else min(config.trainers, cores(config.threads))
        return min(wanted, len(self.work.data.chunks))

    def compute(self, folder: Path, workers: int | None, tell: Tell | None = None) -> Work:
        """In this folder, with what is there of the same request; all results lie there then."""
        count = self.count(workers)
        work = replace(self.work, folder=folder)
        if work.begin(self.program) and (left := len(work.missing())) < len(work.data.chunks):
            log.warning("going on: %d of %d parts are there", len(work.data.chunks) - left, len(work.data.chunks))
        Pool(work, count, self.trained.config.onednn_isa, tell).run()
        return work


def results_of(work: Work, program: Program) -> Iterator[dict[str, Tensor]]:
    """Of each chunk, in order. At the end, a warning if some are not finite."""
    first, wild = work.data.first_records(), dict[str, list[int]]()
    for chunk, found in enumerate(work.results()):
        for name, values in found.items():
            small = values.dtype.itemsize == 1  # float8 has no isfinite
            rows = nonfinite_rows(values.float() if small else values) if values.is_floating_point() else []
            wild.setdefault(name, []).extend(first[chunk] + row for row in rows)
        yield found
    for name, rows in wild.items():
        if rows:
            names = open_reader(work.data, work.folder, 0).names(rows[:NAMED])
            more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
            log.warning(
                "'%s' is NOT FINITE for %d of %d records: %s%s",
                name,
                len(rows),
                work.data.records,
                ", ".join(names),
                more,
            )


def _check_device(device: str) -> None:
    try:
        find_device(device)
    except UsageError as error:
        raise UsageError(
            error.message, rule=error.rule, help="name another one: --device cpu; in a script device='cpu'"
        ) from error
