"""Predictions as files: .npz, .safetensors, .csv, .parquet; written whole, or not at all."""

from __future__ import annotations

import contextlib
import csv
import os
import uuid
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

Parts = Iterable[Mapping[str, Tensor]]
"""By chunk, the results by name."""


def check_output(path: Path, program: Program) -> None:
    """Raises UsageError for a format that is unknown, or cannot hold the results."""
    if path.suffix not in _WRITERS:
        raise UsageError(
            f"{path} ends in '{path.suffix}'", rule="format", help=f"give a name that ends in {' or '.join(_WRITERS)}"
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder", rule="format", help="give a file's name")
    for name in program.attrs["extras"]:
        type = program.variables[name].type
        if path.suffix in (".csv", ".parquet") and len(type.shape or ()) > 2:
            raise UsageError(
                f"'{name}' is {type}, and {path.suffix} has rows and columns", rule="format", help="give a .npz file"
            )


def write_output(path: Path, names: Sequence[str], records: int, parts: Parts) -> None:
    """The results `names` of all `records`. What was there is replaced in the end. Raises OSError."""
    with _replacing(path) as temporary:
        _WRITERS[path.suffix](temporary, names, records, parts)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    make_folder(path.absolute().parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
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
    columns = {}
    for name in names:
        array = _array(part[name])
        if array.ndim == 1:
            columns[name] = array
        else:
            columns.update({f"{name}_{i}": array[:, i] for i in range(array.shape[1])})
    return columns


def _array(tensor: Tensor) -> np.ndarray:
    """NumPy has no bfloat16: float32 holds the same values."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


_WRITERS = {".npz": _npz, ".csv": _csv, ".parquet": _parquet, ".safetensors": _safetensors}
