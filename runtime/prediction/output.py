"""Predictions as files: .npz, .safetensors, .csv, .parquet; written whole, or not at all."""

from __future__ import annotations

import contextlib
import csv
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphft.errors import UsageError
from graphft.fileio import fsync, make_folder
from graphft.ir import Program
from graphft.tensor_file import write_tensors

_SAFETENSORS = "give a .safetensors file"
Parts = Iterable[Mapping[str, Tensor]]
"""By chunk, the results by name."""


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


def write_output(path: Path, names: Sequence[str], records: int, parts: Parts, temporary: Path) -> None:
    """The results `names` of all `records`. What was there is replaced in the end, by the `temporary` file, which is in
    the same file system. Raises OSError."""
    with _replacing(path, temporary):
        _WRITERS[path.suffix](temporary, names, records, parts)


@contextlib.contextmanager
def _replacing(path: Path, temporary: Path) -> Iterator[None]:
    make_folder(path.absolute().parent)
    try:
        yield
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.absolute().parent)
    finally:
        temporary.unlink(missing_ok=True)


def _npz(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    """Arrays one behind the other, though the parts come with a piece of each."""
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for part in parts:
        for name in names:
            pieces[name].append(_array(part[name]))
    with zipfile.ZipFile(path, "w") as file:
        for name, arrays in pieces.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                header = {"shape": (records, *arrays[0].shape[1:]), "fortran_order": False}
                np.lib.format.write_array_header_1_0(entry, header | {"descr": arrays[0].dtype.str})
                for array in arrays:
                    entry.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"")


def _safetensors(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    found = list(parts)
    write_tensors(path, {name: torch.cat([part[name] for part in found]) for name in names}, {"format": "pt"})


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
    writer: Any = None
    for part in parts:
        table = pyarrow.table(_table(part, names))
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    writer.close()


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
