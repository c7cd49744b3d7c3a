"""`graphft predict`: writes predictions as a file: .npz, .safetensors, .csv, .parquet; whole, or not at all."""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from graphft.disk.fileio import fsync, make_folder, scratch_folder
from graphft.disk.tensor_file import write_tensors
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Program
from graphft.runtime.coordination.job_files import is_url
from graphft.runtime.coordination.runs import find_folder
from graphft.runtime.prediction.predict import Prediction, collected

Parts = Iterable[Mapping[str, Tensor]]
"""The results of some records at a time, by name."""


def predict_to_file(options: argparse.Namespace) -> int:
    out, begun = Path(options.out), time.monotonic()
    out = out.resolve() if out.is_symlink() else out  # what it names is replaced, not the link
    _check_place(out, options.job, options.data)
    prediction = Prediction.of(
        options.job,
        options.data,
        _columns_given(options.column) or None,
        options.batch_size,
        options.step,
        options.best,
        options.weights,
        options.device,
    )
    check_output(out, prediction.program)
    names, records = prediction.results, prediction.data.records
    try:
        with prediction.settings():
            write_output(out, names, records, _shown(prediction.parts(), names[0], records))
    except OSError as error:
        raise GraphftError(
            f"{out} cannot be written: {describe(error)}", rule="predict", help="see whether there is room"
        ) from error
    results = ", ".join(f"{name}: {prediction.program.variables[name].type}" for name in names)
    print(f"{out}: {records} records, {results}; {time.monotonic() - begun:.1f} s")
    print(f"weights: {prediction.trained.weights}")
    return 0


def _shown(parts: Iterator[dict[str, Tensor]], name: str, records: int) -> Iterator[dict[str, Tensor]]:
    """Yields the parts; on a terminal, shows how many records are done."""
    done = 0
    for part in parts:
        yield part
        done += len(part[name])
        if sys.stderr.isatty():
            end = "\n" if done == records else ""
            print(f"\r{done} of {records} records", end=end, file=sys.stderr, flush=True)


def _check_place(out: Path, job: str, data: list[str]) -> None:
    """Raises UsageError for a file that something else is in: data, or a part of the job."""
    if not is_url(job) and out.resolve().is_relative_to(find_folder(job, complete=True).resolve()):
        raise UsageError(f"{out} is in the folder of the job", rule="predict", help="write elsewhere")
    read = [path for given in data for path in (given, *glob.glob(given))]
    if out.exists() and any(os.path.exists(path) and out.samefile(path) for path in read):
        raise UsageError(f"{out} is the data to predict from", rule="predict", help="give another --out")


def _columns_given(given: list[str]) -> dict[str, list[str]]:
    found = {}
    for text in given:
        name, equals, fields = text.partition("=")
        if not equals or not name or not all(fields.split(",")):
            raise UsageError(f"--column {text}", rule="usage", help="--column x=age,weight,height")
        found[name] = fields.split(",")
    return found


def check_output(path: Path, program: Program) -> None:
    """Raises UsageError for a format that is unknown, or cannot hold the results."""
    if path.suffix not in _WRITERS or (path.exists() and not path.is_file()):
        raise UsageError(
            f"{path} is no name of a file to write",
            rule="format",
            help=f"give a file's name that ends in {' or '.join(_WRITERS)}",
        )
    columns: list[str] = []
    for name in program.attrs["extras"]:
        type = program.variables[name].type
        table = path.suffix in (".csv", ".parquet")
        lacks = ("float8", "complex") if table else ("float8",) if path.suffix == ".npz" else ()
        if type.dtype.startswith(lacks) or (table and len(type.shape or ()) > 2):
            raise UsageError(
                f"'{name}' is {type}, which {path.suffix} cannot hold", rule="format", help="give a .safetensors file"
            )
        columns += _columns(name, (type.shape or ())[1:]) if table else []
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        raise UsageError(
            f"several results have a column {twice[0]} in a {path.suffix} file",
            rule="format",
            help="rename one of them in predict=, or give a .npz file",
        )


def _columns(name: str, shape: Sequence[Any]) -> list[str]:
    """Returns those of a result whose records have this shape: of none, or one dimension."""
    return [f"{name}_{i}" for i in range(shape[0])] if shape else [name]


def write_output(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    """Writes the results `names` of all `records`. What is at `path` is replaced in the end. Raises OSError."""
    folder = path.absolute().parent
    make_folder(folder)
    with scratch_folder(path) as scratch:
        new = scratch / path.name
        _WRITERS[path.suffix](new, names, records, parts)
        fsync(new)
        os.replace(new, path)
    fsync(folder)


def _npz(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    whole = collected(names, records, parts)
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, _array(whole[name]), allow_pickle=False)


def _safetensors(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    write_tensors(path, collected(names, records, parts), {"format": "pt"})


def _csv(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    """Floats in as many digits as give the same bits again."""
    _write_tables(path, names, parts, pyarrow.csv.CSVWriter)


def _parquet(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    _write_tables(path, names, parts, pyarrow.parquet.ParquetWriter)


def _write_tables(path: Path, names: Sequence[str], parts: Parts, open_writer: Callable[[Path, Any], Any]) -> None:
    with contextlib.ExitStack() as stack:
        writer: Any = None
        for part in parts:
            columns: dict[str, np.ndarray] = {}
            for name in names:
                array = _array(part[name])
                one_by_one = array.T if array.ndim > 1 else [array]
                columns.update(zip(_columns(name, array.shape[1:]), one_by_one, strict=True))
            table = pyarrow.table(columns)
            writer = writer or stack.enter_context(open_writer(path, table.schema))
            writer.write_table(table)


def _array(tensor: Tensor) -> np.ndarray:
    """Returns float32 for bfloat16, which NumPy does not have."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


_WRITERS = {".npz": _npz, ".csv": _csv, ".parquet": _parquet, ".safetensors": _safetensors}
