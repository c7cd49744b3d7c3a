"""Writes predictions as files: .npz, .safetensors, .csv, .parquet; whole, or not at all."""

from __future__ import annotations

import contextlib
import csv
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphft.disk.fileio import fsync, make_folder, scratch_folder
from graphft.disk.tensor_file import write_tensors
from graphft.errors import UsageError
from graphft.ir import Program

_SAFETENSORS = "give a .safetensors file"
ROW_GROUP = 65536
"""Records of a row group of a .parquet file, at least."""
Parts = Iterable[Mapping[str, Tensor]]
"""The results of some records at a time, by name."""


def collected(names: Sequence[str], records: int, parts: Parts) -> dict[str, Tensor]:
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


def check_output(path: Path, program: Program) -> None:
    """Raises UsageError for a format that is unknown, or cannot hold the results."""
    if path.suffix not in _WRITERS:
        raise UsageError(
            f"{path} ends in '{path.suffix}'", rule="format", help=f"give a name that ends in {' or '.join(_WRITERS)}"
        )
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no file"
        raise UsageError(f"{path} is {what}", rule="format", help="give a file's name")
    if path.suffix in (".csv", ".parquet"):
        _check_columns(path.suffix, program)
    elif path.suffix == ".npz":
        for name in program.attrs["extras"]:
            dtype = program.variables[name].dtype
            if dtype.startswith("float8"):
                raise UsageError(f"'{name}' is {dtype}, which NumPy does not have", rule="format", help=_SAFETENSORS)


def _check_columns(suffix: str, program: Program) -> None:
    """Raises UsageError for results that are no columns, or have the same ones."""
    owner: dict[str, str] = {}
    for name in program.attrs["extras"]:
        type = program.variables[name].type
        if len(type.shape or ()) > 2:
            raise UsageError(
                f"'{name}' is {type}, and {suffix} has rows and columns", rule="format", help="give a .npz file"
            )
        if type.dtype.startswith("float8") or (suffix == ".parquet" and type.dtype.startswith("complex")):
            raise UsageError(f"'{name}' is {type}, which {suffix} does not have", rule="format", help=_SAFETENSORS)
        for column in _columns(name, (type.shape or ())[1:]):
            if (other := owner.setdefault(column, name)) != name:
                raise UsageError(
                    f"'{other}' and '{name}' both have a column {column} in a {suffix} file",
                    rule="format",
                    help="rename one of them in predict=, or give a .npz file",
                )


def _columns(name: str, shape: Sequence[Any]) -> list[str]:
    """Those of a result whose records have this shape: of none, or one dimension."""
    return [f"{name}_{i}" for i in range(shape[0])] if shape else [name]


def write_output(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    """Writes the results `names` of all `records`. What is at `path` is replaced in the end. Raises OSError."""
    folder = path.absolute().parent
    make_folder(folder)
    with scratch_folder(path) as scratch:
        new = scratch / "job"  # the name by which `scratch_folder` knows what a killed process has left
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
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, part in enumerate(parts):
            table = _table(part, names)
            if not number:
                writer.writerow(table)
            writer.writerows(zip(*(column.astype(str) for column in table.values()), strict=True))


def _parquet(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            ".parquet needs pyarrow, which is not installed", rule="missing-package", help="pip install pyarrow"
        ) from error
    with contextlib.ExitStack() as stack:
        writer: Any = None
        tables: list[Any] = []
        rows = 0
        for part in parts:
            tables.append(pyarrow.table(_table(part, names)))
            writer = writer or stack.enter_context(pyarrow.parquet.ParquetWriter(path, tables[0].schema))
            rows += len(tables[-1])
            if rows >= records or sum(map(len, tables)) >= ROW_GROUP:
                writer.write_table(pyarrow.concat_tables(tables))
                tables = []


def _table(part: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, np.ndarray]:
    """One column for each entry that a record has: `scores_0`, `scores_1`, ..."""
    columns: dict[str, np.ndarray] = {}
    for name in names:
        array = _array(part[name])
        parts = array.T if array.ndim > 1 else [array]
        columns.update(zip(_columns(name, array.shape[1:]), parts, strict=True))
    return columns


def _array(tensor: Tensor) -> np.ndarray:
    """NumPy has no bfloat16: float32 holds the same values."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


_WRITERS = {".npz": _npz, ".csv": _csv, ".parquet": _parquet, ".safetensors": _safetensors}
