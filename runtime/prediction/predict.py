"""`graphft.predict`: runs a job's program on data, in this process, and gives the results in the data's order."""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphft.data import DataSpec, arrays, files
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Kind, Program, Variable
from graphft.ir.literals import evaluate, names_in
from graphft.options import checked_keywords, find_device, is_whole
from graphft.runtime.coordination.runs import find_run
from graphft.runtime.data import IN_ORDER, Reader, open_reader
from graphft.runtime.execute.finite import nonfinite_rows
from graphft.runtime.executor import Executor
from graphft.runtime.interchange.trained_program import Trained, read_trained
from graphft.runtime.launcher.run_folder import run_of
from graphft.transpiler import Job

log = logging.getLogger("graphft")

PART = 16384
"""Records of a part of the results, about."""
NAMED = 3
"""Records that a warning names."""
Fields = str | Sequence[str]
_FORMATS = {".csv": "csv", ".parquet": "parquet"}
_LISTED = "a .csv, .parquet or .npz file; in a script a dict of arrays, or graphft.files(...), too"


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
            .csv, .parquet files, or of one .npz file. Labels are not needed.
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
        find_device(device or config.device)
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
                raise _of_records(error, numbers) from error
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


def _of_records(error: Exception, numbers: range) -> GraphftError:
    """Names the records of a batch that failed."""
    rule, help = "predict", "it is of the data, or of what the model computes"
    if isinstance(error, GraphftError):
        rule, help = error.rule, error.help
    return GraphftError(f"in records {numbers[0]} to {numbers[-1]}: {describe(error)}", rule=rule, help=help)


def collected(names: Sequence[str], records: int, parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the results `names` of all `records`, each part copied once, into its place."""
    whole: dict[str, Tensor] = {}
    start = 0
    for part in parts:
        end = start + len(part[names[0]])
        for name in names:
            if name not in whole:
                whole[name] = part[name].new_empty((records, *part[name].shape[1:]))
            whole[name][start:end] = part[name]
        start = end
    return whole


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


# -- the data ---------------------------------------------------------------------------------------------------------


def describe_data(program: Program, given: Any, columns: Mapping[str, Fields] | None, trained: DataSpec) -> DataSpec:
    """Returns a description of the data. `given`: arrays by column, a description, or paths and URLs of files.
    `columns`: which fields of a file each input has; by default those that it had where the job was trained
    (`trained`), or one of its own name.

    Raises UsageError[columns] where it does not fit the program's inputs; and as `arrays` and `files` do.
    """
    inputs = program.of_kind(Kind.INPUT)
    if not isinstance(given, (DataSpec, Mapping)):
        paths = _paths(given)
        suffix = posixpath.splitext(paths[0])[1]
        if suffix != ".npz":
            spec = _of_files(inputs, paths, suffix, columns, trained)
            return _fits(inputs, spec)
        given = _npz(inputs, paths)
    if columns:
        raise UsageError("columns are given, and no files that have fields", rule="columns", help=f"give {_LISTED}")
    if isinstance(given, Mapping):
        for v in inputs:
            if v.name not in given:
                raise _missing(v, given)
        given = arrays(**{v.name: given[v.name] for v in inputs})
    return _fits(inputs, given)


def _paths(given: Any) -> list[str]:
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(p, (str, Path)) for p in several):
        raise UsageError(f"the data is a {type(given).__name__}", rule="data", help=f"give {_LISTED}")
    paths = [os.fspath(p) for p in several]
    suffixes = {posixpath.splitext(p)[1] for p in paths}
    if len(suffixes) > 1 or not suffixes <= {".npz", *_FORMATS} or (suffixes == {".npz"} and len(paths) > 1):
        raise UsageError(
            f"the data is in {', '.join(paths[:3])}",
            rule="format",
            help=f"give files of one format, one .npz: {_LISTED}",
        )
    return paths


def _of_files(
    inputs: Sequence[Variable], paths: list[str], suffix: str, columns: Mapping[str, Fields] | None, trained: DataSpec
) -> DataSpec:
    if unknown := sorted((columns or {}).keys() - {v.name for v in inputs}):
        raise UsageError(
            f"there is no input {unknown[0]}: what is predicted is computed of {', '.join(v.name for v in inputs)}",
            rule="columns",
            help="--column INPUT=FIELD,FIELD; in a script columns={input: (field, field)}",
        )
    fields = {v.name: _fields(v, (columns or {}).get(v.name), trained) for v in inputs}
    return files(paths, _FORMATS[suffix], fields, {v.name: v.dtype for v in inputs})


def _fields(v: Variable, given: Fields | None, trained: DataSpec) -> Fields:
    """Returns those of an input. Raises UsageError[columns] if nobody has said which."""
    scalar = len(v.shape) == 1
    found = given if given is not None else trained.source.get("fields", {}).get(v.name, v.name if scalar else None)
    names = [found] if isinstance(found, str) else list(found or ())
    if not names or (scalar and len(names) > 1):
        raise UsageError(
            f"input {v.name} is {v.type}: which {'field' if scalar else 'fields'} of the file does it have?",
            rule="columns",
            help=f"--column {v.name}=FIELD,FIELD,...; in a script columns={{'{v.name}': ('FIELD', 'FIELD')}}",
        )
    return names[0] if scalar else names


def _npz(inputs: Sequence[Variable], paths: list[str]) -> dict[str, np.ndarray]:
    """Returns the arrays that the inputs have; what else there is is not read."""
    try:
        with np.load(paths[0], allow_pickle=False) as found:
            return {v.name: found[v.name] for v in inputs if v.name in found.files}
    except Exception as error:  # numpy, zipfile and zlib have one each for what is damaged
        raise UsageError(
            f"{paths[0]} cannot be read: {describe(error)}", rule="format", help="write it with numpy.savez"
        ) from error


def _fits(inputs: Sequence[Variable], spec: DataSpec) -> DataSpec:
    """Returns it, if it has each input as the program was captured for it."""
    for v in inputs:
        if v.name not in spec.types:
            raise _missing(v, spec.types)
        found = spec.types[v.name]
        pairs = list(zip(v.shape[1:], (found.shape or ())[1:], strict=False))
        other = len(v.shape) != len(found.shape or ()) or any(not names_in(a) and a != b for a, b in pairs)
        if found.dtype != v.dtype or other:
            raise UsageError(
                f"input {v.name} is {v.type}, and the data's column is {found}",
                rule="columns",
                help="give it the shape that the model was trained with"
                if found.dtype == v.dtype
                else f"convert it: x.astype('{v.dtype}') in NumPy, x.to(torch.{v.dtype}) in torch",
            )
    return spec


def _missing(v: Variable, there: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"input {v.name} ({v.type}) is not in the data, which has {', '.join(there) or 'nothing'}",
        rule="columns",
        help="name the data's columns as the program's inputs are; labels are not needed",
    )
