"""`graphft.predict`: runs a job's program on data, in this process, and gives the results in the data's order."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphft.data import DataSpec
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Kind, Program
from graphft.ir.literals import evaluate, names_in
from graphft.options import checked_keywords, find_device, is_whole
from graphft.runtime.coordination.runs import find_run
from graphft.runtime.data import IN_ORDER, Reader, open_reader
from graphft.runtime.execute.finite import nonfinite_rows
from graphft.runtime.execute.whole_numbers import whole_numbers
from graphft.runtime.executor import Executor
from graphft.runtime.interchange.trained_program import Trained, read_trained
from graphft.runtime.launcher.run_folder import run_of
from graphft.runtime.prediction.given import Fields, describe_data
from graphft.runtime.prediction.output import collected
from graphft.transpiler import Job

log = logging.getLogger("graphft")

PART = 4096
"""Records of a part of the results, about."""
NAMED = 3
"""Records that a warning names."""


@checked_keywords
def predict(
    job: str | os.PathLike[str] | Job,
    data: Any,
    *,
    columns: Mapping[str, Fields] | None = None,
    batch_size: int | None = None,
    step: int | None = None,
    best: bool = False,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> dict[str, Tensor]:
    """Returns what the trained model of `job` predicts of `data`: by result, an entry for each record, in the data's
    order.

        graphft.predict("jobs/cancer", {"x": x})["output"].argmax(1)
        job.run().predict("new.csv")
        job.predict("new.csv")

    Args:
        job: A job's name or folder, or the URL of its storage. It may be running: its newest checkpoint counts. Or
            what `transpile` returned: its newest run in ./jobs, a complete one if there is any.
        data: Arrays or tensors by input; what `graphft.arrays`, `files` or `dataset` describe; or paths or URLs of
            .csv, .parquet, .jsonl, .npy files, or of one .npz file. Labels are not needed.
        columns: Which fields of the files each input has (default: those that the job was trained with).
        batch_size: Records of a forward pass (default: as in training). The bits may depend on it.
        step: Of a checkpoint that is there, instead of the newest weights.
        best: The best model by its validations (`Validation(best=...)`), instead of the newest.
        weights: Others of the same model: whatever `graphft.read_weights` reads; of a Trainer, what `save` wrote.
        device: (default: the job's)

    Raises GraphftError for data that does not fit, and for a job that has no weights or nothing to predict with.
    """
    prediction = Prediction.of(job, data, columns, batch_size, step, best, weights, device)
    with prediction.settings():
        return collected(prediction.results, prediction.data.records, prediction.parts())


@dataclass(frozen=True)
class Prediction:
    """A trained program, and the data that it is to run on; checked."""

    trained: Trained
    data: DataSpec
    batch_size: int
    device: str

    @staticmethod
    def of(
        job: str | os.PathLike[str] | Job,
        data: Any,
        columns: Mapping[str, Fields] | None = None,
        batch_size: int | None = None,
        step: int | None = None,
        best: bool = False,
        weights: str | os.PathLike[str] | None = None,
        device: str | None = None,
    ) -> Prediction:
        """The arguments are those of `predict`. Raises GraphftError as it does."""
        where = run_of(job) if isinstance(job, Job) else job
        trained = read_trained(find_run(where, complete=True), step, best, weights)
        config, program = trained.config, trained.program
        size = (_fixed(program) or config.batch_size) if batch_size is None else batch_size
        _check_batch_size(program, size)
        _check_device(device or config.device)
        spec = describe_data(program, data, columns, config.data)
        return Prediction(trained, spec, int(size), device or config.device)  # it may be NumPy's

    @property
    def program(self) -> Program:
        return self.trained.program

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(self.program.attrs["extras"])

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Sets what the bits depend on as it is in the job's processes, and puts it back: `parts` runs inside."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.trained.config.threads)
        try:
            with torch.autocast(torch.device(self.device).type, enabled=False):
                yield
        finally:
            torch.set_num_threads(threads)

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yields the results of some batches at a time, by name, in the data's order. At the end, warns of those that
        are not finite."""
        reader = open_reader(self.data, Path(), 0, 2)
        batches = self._batches(reader)
        first, counts = 0, dict.fromkeys(self.results, 0)
        wild: dict[str, list[int]] = {name: [] for name in self.results}
        while some := list(islice(batches, max(1, PART // self.batch_size))):
            part = {name: torch.cat([batch[name] for batch in some]) for name in self.results}
            for name, values in part.items():
                small = values.dtype.itemsize == 1  # float8 has no isfinite
                rows = nonfinite_rows(values.float() if small else values) if values.is_floating_point() else []
                counts[name] += len(rows)
                wild[name] += [first + row for row in rows[: NAMED - len(wild[name])]]
            first += len(part[self.results[0]])
            yield part
        for name, rows in wild.items():
            if rows:
                more = f" and {counts[name] - NAMED} more" if counts[name] > NAMED else ""
                named = ", ".join(reader.names(rows)) + more
                log.warning("'%s' is NOT FINITE for %d of %d records: %s", name, counts[name], first, named)

    def _batches(self, reader: Reader) -> Iterator[dict[str, Tensor]]:
        """Yields the results of one batch after the other. Raises GraphftError with the records of one that fails."""
        executor, first = Executor(self.device, check=False), 0
        inputs = [v.name for v in self.program.of_kind(Kind.INPUT)]
        for columns in _read(reader, inputs, self.batch_size):
            numbers = range(first, first + len(columns[inputs[0]]))
            try:
                found = executor.run(self.program, _filled(self.program, columns, self.batch_size), self.results)
                found = {name: value[: len(numbers)].cpu() for name, value in found.items()}
            except Exception as error:
                raise _of_records(error, columns, numbers, reader) from error
            yield found
            first = numbers.stop


def _read(reader: Reader, inputs: list[str], size: int) -> Iterator[dict[str, Tensor]]:
    """Yields the data in batches of `size`, whatever chunks it has; the last one may be shorter."""
    rest: dict[str, Tensor] = {}
    for chunk, info in enumerate(reader.spec.chunks):
        for batch in range(-(-info.records // size)):
            read = reader.batch(IN_ORDER, chunk, batch, size)
            columns = {n: torch.cat([rest[n], read[n]]) if rest else read[n] for n in inputs}
            records = len(columns[inputs[0]])
            if records >= size:
                yield {n: column[:size] for n, column in columns.items()}
                columns = {n: column[size:].clone() for n, column in columns.items()}
            rest = columns if records != size else {}
    if rest:
        yield rest


def _of_records(error: Exception, columns: Mapping[str, Tensor], numbers: range, reader: Reader) -> GraphftError:
    """Names the records of a batch that failed, and the range of its whole numbers: an index may be too large."""
    found = whole_numbers(columns, lambda samples: reader.names([numbers[sample] for sample in samples]))
    rule, help = "predict", "it is of the data, or of what the model computes"
    if isinstance(error, GraphftError):
        rule, help = error.rule, error.help
    return GraphftError(f"in records {numbers[0]} to {numbers[-1]}{found}: {describe(error)}", rule=rule, help=help)


# -- batch sizes that a program was captured for ----------------------------------------------------------------------


def _check_batch_size(program: Program, size: int) -> None:
    fixed, help = _fixed(program), "leave batch_size out"
    if not is_whole(size, 1):
        raise UsageError(f"batch_size is {size!r}, expected a number, 1 or more", rule="batch-size", help=help)
    only = f"batches of {fixed}" if fixed not in (0, size) else _refused(program, size)
    if only:
        raise UsageError(
            f"the program was captured for {only} only, and batch_size is {size}", rule="batch-size", help=help
        )


def _filled(program: Program, columns: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """Fills a shorter batch up with copies of its last record, if the program was not captured for so few."""
    records = len(next(iter(columns.values())))
    if _fixed(program) in (0, records) and not _refused(program, records):
        return columns
    return {n: torch.cat([c, c[-1:].expand(size - records, *c.shape[1:])]) for n, c in columns.items()}


def _fixed(program: Program) -> int:
    """Returns the size that each batch must have; 0: it may be any."""
    dim = program.of_kind(Kind.INPUT)[0].shape[0]
    return dim if isinstance(dim, int) else 0


def _refused(program: Program, size: int) -> str:
    """Returns the condition that batches of this size do not fulfil; "": none."""
    name = program.of_kind(Kind.INPUT)[0].shape[0]
    conditions = [str(c) for c, _ in program.attrs.get("assume", ())]
    return next((c for c in conditions if names_in(c) == {name} and not evaluate(c, {str(name): size})), "")


def _check_device(device: str) -> None:
    try:
        find_device(device)
    except UsageError as error:
        raise UsageError(
            error.message, rule=error.rule, help="name another one: --device cpu; in a script device='cpu'"
        ) from error
