"""`graphft predict`: writes predictions as a file: .npz, .safetensors, .csv, .parquet; whole, or not at all."""

from __future__ import annotations

import argparse
import glob
import os
import time
import zipfile
from collections.abc import Mapping, Sequence
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
from graphft.runtime.coordination.runs import find_folder, find_run
from graphft.runtime.interchange.trained_program import read_trained
from graphft.runtime.prediction.predict import predict_with

_SUFFIXES = (".npz", ".csv", ".parquet", ".safetensors")


def predict_to_file(options: argparse.Namespace) -> int:
    out, begun = Path(options.out), time.monotonic()
    out = out.resolve() if out.is_symlink() else out  # what it names is replaced, not the link
    _check_place(out, options.job, options.data)
    columns = {}
    for text in options.column:
        name, _, fields = text.partition("=")
        if not name or not all(fields.split(",")):
            raise UsageError(f"--column {text}", rule="usage", help="--column x=age,weight,height")
        columns[name] = fields.split(",")
    trained = read_trained(find_run(options.job, complete=True), options.step, options.best, options.weights)
    check_output(out, trained.program)
    found = predict_with(trained, options.data, columns, options.batch_size, options.device)
    try:
        write_output(out, found)
    except OSError as error:
        text = f"{out} cannot be written: {describe(error)}"
        raise GraphftError(text, rule="predict", help="see whether there is room") from error
    results = ", ".join(f"{name}: {trained.program.variables[name].type}" for name in found)
    print(f"{out}: {len(next(iter(found.values())))} records, {results}; {time.monotonic() - begun:.1f} s")
    print(f"weights: {trained.weights}")
    return 0


def _check_place(out: Path, job: str, data: list[str]) -> None:
    """Raises UsageError for a file that something else is in: data, or a part of the job."""
    if not is_url(job) and out.resolve().is_relative_to(find_folder(job, complete=True).resolve()):
        raise UsageError(f"{out} is in the folder of the job", rule="predict", help="write elsewhere")
    read = [path for given in data for path in (given, *glob.glob(given))]
    if out.exists() and any(os.path.exists(path) and out.samefile(path) for path in read):
        raise UsageError(f"{out} is the data to predict from", rule="predict", help="give another --out")


def check_output(path: Path, program: Program) -> None:
    """Raises UsageError for a format that is unknown, or cannot hold the results."""
    if path.suffix not in _SUFFIXES or (path.exists() and not path.is_file()):
        help = f"give a file's name that ends in {' or '.join(_SUFFIXES)}"
        raise UsageError(f"{path} is no name of a file to write", rule="format", help=help)
    columns: list[str] = []
    for name in program.attrs["extras"]:
        type = program.variables[name].type
        table = path.suffix in (".csv", ".parquet")
        lacks = ("float8", "complex") if table else ("float8",) if path.suffix == ".npz" else ()
        if type.dtype.startswith(lacks) or (table and len(type.shape or ()) > 2):
            text = f"'{name}' is {type}, which {path.suffix} cannot hold"
            raise UsageError(text, rule="format", help="give a .safetensors file")
        columns += _columns(name, (type.shape or ())[1:]) if table else []
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        text = f"several results have a column {twice[0]} in a {path.suffix} file"
        raise UsageError(text, rule="format", help="rename one of them in predict=, or give a .npz file")


def _columns(name: str, shape: Sequence[Any]) -> list[str]:
    """Returns those of a result whose records have this shape: of none, or one dimension."""
    return [f"{name}_{i}" for i in range(shape[0])] if shape else [name]


def write_output(path: Path, found: Mapping[str, Tensor]) -> None:
    """Writes the results by name. What is at `path` is replaced in the end. Raises OSError."""
    folder = path.absolute().parent
    make_folder(folder)
    with scratch_folder(path) as scratch:
        new = scratch / path.name
        if path.suffix == ".safetensors":
            write_tensors(new, found, {"format": "pt"})
        else:
            # NumPy has no bfloat16.
            arrays = {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in found.items()}
            (_write_npz if path.suffix == ".npz" else _write_table)(new, arrays, path.suffix)
        fsync(new)
        os.replace(new, path)
    fsync(folder)


def _write_npz(path: Path, arrays: Mapping[str, np.ndarray], _suffix: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _write_table(path: Path, arrays: Mapping[str, np.ndarray], suffix: str) -> None:
    """Writes floats, in CSV, with as many digits as give the same bits again."""
    columns: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        columns.update(zip(_columns(name, array.shape[1:]), array.T if array.ndim > 1 else [array], strict=True))
    write = pyarrow.csv.write_csv if suffix == ".csv" else pyarrow.parquet.write_table
    write(pyarrow.table(columns), path)
