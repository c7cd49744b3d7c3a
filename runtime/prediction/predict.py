"""`graphft.predict`: runs a job's program on data, in this process, and gives the results in the data's order."""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphft.data import DataSpec, arrays, files
from graphft.data.datasets import torch_threads
from graphft.errors import LISTED, GraphftError, UsageError, describe, listed
from graphft.ir import Kind, Program, Variable
from graphft.options import checked_keywords, find_device, is_whole
from graphft.runtime.coordination.runs import find_run
from graphft.runtime.data import IN_ORDER, Reader, open_reader
from graphft.runtime.execute.finite import nonfinite_rows
from graphft.runtime.executor import Executor
from graphft.runtime.interchange.trained_program import Trained, read_trained
from graphft.runtime.launcher.run_folder import run_of
from graphft.transpiler.inputs import check_columns, refused
from graphft.transpiler.job import Job

log = logging.getLogger("graphft")

Fields = str | Sequence[str]
_FORMATS = {".csv": "csv", ".parquet": "parquet"}
_LISTED = "files of one format, .csv or .parquet, or one .npz; in a script arrays, or graphft.files(...), too"


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
    found = find_run(run_of(job) if isinstance(job, Job) else job, complete=True)
    return predict_with(read_trained(found, step, best, weights), data, columns, batch_size, device)


def predict_with(
    trained: Trained, data: Any, columns: Mapping[str, Fields] | None, batch_size: int | None, device: str | None
) -> dict[str, Tensor]:
    """Runs a program with its weights: the other arguments are those of `predict`."""
    program, config = trained.program, trained.config
    inputs, device = program.of_kind(Kind.INPUT), device or config.device
    fixed = inputs[0].shape[0]
    size = batch_size if batch_size is not None else fixed if isinstance(fixed, int) else config.batch_size
    help = "leave batch_size out"
    if not is_whole(size, 1):
        raise UsageError(f"batch_size is {size!r}, expected a number, 1 or more", rule="batch-size", help=help)
    if only := refused(program, inputs, size):
        text = f"the program was captured for {only} only, and batch_size is {size}"
        raise UsageError(text, rule="batch-size", help=help)
    find_device(device)
    spec = describe_data(inputs, data, columns, config.data)
    reader = open_reader(spec, Path(), 0, 2)
    with torch_threads(config.threads), torch.autocast(torch.device(device).type, enabled=False):
        found = _computed(program, reader, int(size), device)
    for name, values in found.items():
        small = values.dtype.itemsize == 1  # float8 has no isfinite
        rows = nonfinite_rows(values.float() if small else values) if values.is_floating_point() else []
        if len(rows):
            named = listed(reader.names(rows[:LISTED]), total=len(rows))
            log.warning("'%s' is NOT FINITE for %d of %d records: %s", name, len(rows), len(values), named)
    return found


def _computed(program: Program, reader: Reader, size: int, device: str) -> dict[str, Tensor]:
    """Returns the results of all records. Raises GraphftError with the records of a batch that fails."""
    executor, first = Executor(device, check=False), 0
    inputs = program.of_kind(Kind.INPUT)
    parts: dict[str, list[Tensor]] = {name: [] for name in program.attrs["extras"]}
    for columns in _read(reader, [v.name for v in inputs], size):
        records = len(columns[inputs[0].name])
        given = columns
        if refused(program, inputs, records):  # it is filled up with copies of its last record
            given = {n: torch.cat([c, c[-1:].expand(size - records, *c.shape[1:])]) for n, c in columns.items()}
        numbers = range(first, first + records)
        try:
            for name, value in executor.run(program, given, list(parts)).items():
                parts[name].append(value[:records].cpu())
        except Exception as error:
            raise _of_records(error, numbers) from error
        first = numbers.stop
    return {name: torch.cat(found) for name, found in parts.items()}


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


# -- the data ---------------------------------------------------------------------------------------------------------


def describe_data(
    inputs: Sequence[Variable], given: Any, columns: Mapping[str, Fields] | None, trained: DataSpec
) -> DataSpec:
    """Returns a description of the data. `given`: arrays by column, a description, or paths and URLs of files.
    `columns`: which fields of a file each input has; by default those that it had where the job was trained
    (`trained`), or one of its own name.

    Raises UsageError[columns] where it does not fit the program's inputs; and as `arrays` and `files` do.
    """
    if not isinstance(given, (DataSpec, Mapping)):
        several = given if isinstance(given, (list, tuple)) else [given]
        paths = [os.fspath(p) for p in several if isinstance(p, (str, os.PathLike))]
        if not paths or len(paths) < len(several):
            raise UsageError(f"the data is a {type(given).__name__}", rule="data", help=f"give {_LISTED}")
        suffixes = {posixpath.splitext(p)[1] for p in paths}
        if len(suffixes) == 1 and suffixes <= _FORMATS.keys():
            given = _of_files(inputs, paths, _FORMATS[suffixes.pop()], columns or {}, trained)
            columns = None
        elif suffixes == {".npz"} and len(paths) == 1:
            given = _npz(inputs, paths[0])
        else:
            raise UsageError(f"the data is in {', '.join(paths[:3])}", rule="format", help=f"give {_LISTED}")
    if columns:
        raise UsageError("columns are given, and no files that have fields", rule="columns", help=f"give {_LISTED}")
    if isinstance(given, Mapping):
        names = [v.name for v in inputs if v.name in given] or list(given)
        given = arrays(**{name: given[name] for name in names})
    check_columns(inputs, given)
    return given


def _of_files(
    inputs: Sequence[Variable], paths: list[str], format: Any, columns: Mapping[str, Fields], trained: DataSpec
) -> DataSpec:
    if unknown := sorted(columns.keys() - {v.name for v in inputs}):
        text = f"there is no input {unknown[0]}: what is predicted is computed of {', '.join(v.name for v in inputs)}"
        raise UsageError(text, rule="columns", help="--column INPUT=FIELD,FIELD; in a script columns={input: (field,)}")
    fields = {}
    for v in inputs:
        scalar = len(v.shape) == 1
        found = columns.get(v.name) or trained.source.get("fields", {}).get(v.name, v.name if scalar else ())
        names = [found] if isinstance(found, str) else list(found)
        if not names or (scalar and len(names) > 1):
            text = f"input {v.name} is {v.type}: which {'field' if scalar else 'fields'} of the file does it have?"
            help = f"--column {v.name}=FIELD,FIELD,...; in a script columns={{'{v.name}': ('FIELD', 'FIELD')}}"
            raise UsageError(text, rule="columns", help=help)
        fields[v.name] = names[0] if scalar else names
    return files(paths, format, fields, {v.name: v.dtype for v in inputs})


def _npz(inputs: Sequence[Variable], path: str) -> dict[str, np.ndarray]:
    """Returns the arrays that the inputs have; what else there is is not read."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return {v.name: found[v.name] for v in inputs if v.name in found.files}
    except Exception as error:  # numpy, zipfile and zlib have one each for what is damaged
        text = f"{path} cannot be read: {describe(error)}"
        raise UsageError(text, rule="format", help="write it with numpy.savez") from error
