"""Describes the data to predict from, however it is given, with the columns that the program reads."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphft.data import DataSpec, arrays, files
from graphft.errors import UsageError, describe
from graphft.ir import Kind, Program, Variable
from graphft.ir.literals import names_in

Fields = str | Sequence[str]

_FORMATS = {".csv": "csv", ".parquet": "parquet", ".jsonl": "jsonl", ".npy": "npy"}
_LISTED = "a .csv, .parquet, .jsonl, .npz or .npy file; in a script a dict of arrays, or graphft.files(...), too"


def describe_data(program: Program, given: Any, columns: Mapping[str, Fields] | None, trained: DataSpec) -> DataSpec:
    """Returns a description of the data. `given`: arrays by column, a description, or paths and URLs of files.
    `columns`: which fields of a file each input has; by default those that it had where the job was trained
    (`trained`), or one of its own name.

    Raises UsageError[columns] where it does not fit the program's inputs; and as `arrays` and `files` do.
    """
    inputs = program.of_kind(Kind.INPUT)
    if isinstance(given, DataSpec):
        spec = given
    elif isinstance(given, Mapping):
        spec = _of_arrays(inputs, given)
    else:
        spec = _of_files(inputs, _paths(given), columns, trained)
        columns = None
    if columns:
        raise UsageError("columns are given, and no files that have fields", rule="columns", help=f"give {_LISTED}")
    for v in inputs:
        _check(v, spec)
    return spec


def _of_arrays(inputs: Sequence[Variable], given: Mapping[str, Any]) -> DataSpec:
    wanted = {v.name: given[v.name] for v in inputs if v.name in given}
    for v in inputs:
        if v.name not in wanted:
            raise _missing(v, given)
    return arrays(**wanted)


def _of_files(
    inputs: Sequence[Variable], paths: Sequence[str], columns: Mapping[str, Fields] | None, trained: DataSpec
) -> DataSpec:
    suffix = posixpath.splitext(paths[0])[1]
    if suffix == ".npz":
        return _of_arrays(inputs, _npz(inputs, paths, columns))
    if suffix not in _FORMATS:
        raise UsageError(f"{paths[0]} ends in '{suffix}'", rule="format", help=f"give {_LISTED}")
    if suffix == ".npy":
        if len(inputs) > 1 or columns:
            names = ", ".join(v.name for v in inputs)
            raise UsageError(
                f"a .npy file is one column, and the inputs are {names}", rule="columns", help="give a .npz file"
            )
        return files({inputs[0].name: list(paths)}, "npy")
    known = {v.name for v in inputs}
    if unknown := [name for name in columns or {} if name not in known]:
        raise UsageError(
            f"there is no input {unknown[0]}: what is predicted is computed of {', '.join(sorted(known))}",
            rule="columns",
            help="--column INPUT=FIELD,FIELD; in a script columns={input: (field, field)}",
        )
    fields = {v.name: _fields(v, (columns or {}).get(v.name), trained) for v in inputs}
    return files(list(paths), _FORMATS[suffix], fields, {v.name: v.dtype for v in inputs})


def _fields(v: Variable, given: Fields | None, trained: DataSpec) -> Fields:
    """Those of an input. Raises UsageError[columns] if nobody has said which."""
    scalar = len(v.shape) == 1
    found = given if given is not None else trained.source.get("fields", {}).get(v.name)
    if found is None and scalar:
        return v.name
    if found is None:
        raise UsageError(
            f"input {v.name} is {v.type}: which fields of the file does it have? The job was trained with data that "
            "has no fields",
            rule="columns",
            help=f"--column {v.name}=FIELD,FIELD,...; in a script columns={{'{v.name}': ('FIELD', 'FIELD')}}",
        )
    names = [found] if isinstance(found, str) else list(found)
    if scalar and len(names) > 1:
        raise UsageError(f"input {v.name} is {v.type}: it has one field", rule="columns", help="name one")
    return names[0] if scalar else names


def _npz(
    inputs: Sequence[Variable], paths: Sequence[str], columns: Mapping[str, Fields] | None
) -> dict[str, np.ndarray]:
    """The arrays that the inputs have; what else there is is not read."""
    if columns or len(paths) > 1:
        raise UsageError(
            ".npz files are given one at a time, and have no fields",
            rule="columns",
            help="their arrays have the names of inputs",
        )
    try:
        with np.load(paths[0], allow_pickle=False) as found:
            for v in inputs:
                if v.name not in found.files:
                    raise _missing(v, dict.fromkeys(found.files))
            return {v.name: found[v.name] for v in inputs}
    except UsageError:
        raise
    except Exception as error:  # numpy, zipfile and zlib have one each for what is damaged
        raise UsageError(
            f"{paths[0]} cannot be read: {describe(error)}", rule="format", help="write it with numpy.savez"
        ) from error


def _paths(given: Any) -> list[str]:
    several = [given] if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(several, (list, tuple)) or not several or not all(isinstance(p, (str, Path)) for p in several):
        raise UsageError(f"the data is a {type(given).__name__}", rule="data", help=f"give {_LISTED}")
    paths = [os.fspath(p) for p in several]
    if len({posixpath.splitext(p)[1] for p in paths}) > 1:
        raise UsageError(f"the files have several formats: {', '.join(paths[:3])}", rule="format", help="give one")
    return paths


def _check(v: Variable, spec: DataSpec) -> None:
    """The data has this input, as the program was captured for it."""
    if v.name not in spec.types:
        raise _missing(v, spec.types)
    found = spec.types[v.name]
    if found.dtype != v.dtype:
        raise UsageError(
            f"input {v.name} is {v.type}, and the data's column is {found}",
            rule="columns",
            help=f"convert it: x.astype('{v.dtype}') in NumPy, x.to(torch.{v.dtype}) in torch",
        )
    pairs = list(zip(v.shape[1:], (found.shape or ())[1:], strict=False))
    if len(v.shape) != len(found.shape or ()) or any(not names_in(a) and a != b for a, b in pairs):
        raise UsageError(
            f"input {v.name} is {v.type}, and the data's column is {found}",
            rule="columns",
            help="give it the shape that the model was trained with",
        )


def _missing(v: Variable, there: Mapping[str, Any]) -> UsageError:
    return UsageError(
        f"input {v.name} ({v.type}) is not in the data, which has {', '.join(there) or 'nothing'}",
        rule="columns",
        help="name the data's columns as the program's inputs are; labels are not needed",
    )
