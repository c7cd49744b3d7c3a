"""Programs on disk: a directory with `program.gft` (text) and `values.safetensors` (initial values). No pickle.

A directory is written beside its final place and renamed into it: readers see the old one or the new one, whole.
Values have checksums. So has the text of a program that is saved `sealed`; that of others may be edited.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from graphft.disk.fileio import fsync, read_regular
from graphft.disk.tensor_file import checksum_of, read_tensors, write_tensors
from graphft.errors import GraphftError
from graphft.ir import Program
from graphft.ir.parser import ParseError, parse
from graphft.ir.printer import format_program

TEXT = "program.gft"
VALUES = "values.safetensors"
_SEAL = "text"
"""In the metadata of the values: the checksum of a sealed text."""
_AGAIN = "save the program again, or copy the folder again"
T = TypeVar("T")


def save_program(program: Program, path: str | os.PathLike[str], *, sealed: bool = False) -> None:
    """Writes `program` into directory `path`, replacing the program that is there.

    Raises GraphftError, and leaves `path` as it was, when the program does not read back, a value cannot be saved,
    or `path` holds anything but a saved program.

    `sealed`: its text is not to be edited.
    """
    target = Path(path).absolute()
    _check_target(target)
    text = format_program(program)
    _check_text(text, program)
    _check_dense(program.values)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            (new / TEXT).write_text(text, encoding="utf-8", newline="\n")
            write_tensors(new / VALUES, program.values, {_SEAL: checksum_of(text.encode())} if sealed else None)
            for item in (new / TEXT, new / VALUES, new):
                fsync(item)
            _replace(new, target, Path(scratch, "old"))
        fsync(target.parent)
    except OSError as error:
        raise GraphftError(
            f"cannot save program '{program.name}' to {target}: {error}",
            rule="save",
            help="check that the folder above can be written, and has room",
        ) from error


def load_program(path: str | os.PathLike[str]) -> Program:
    """The program in directory `path`. Raises GraphftError for files that are missing, damaged or do not fit."""
    directory = Path(path)
    text = _read(directory, TEXT, read_regular)
    try:
        values, metadata = _read(directory, VALUES, read_tensors)
    except GraphftError as error:
        if error.rule == "load":
            raise
        raise GraphftError(f"{directory / VALUES} is damaged: {error.message}", rule="load", help=_AGAIN) from error
    if metadata.get(_SEAL, checksum := checksum_of(text)) != checksum:
        raise GraphftError(f"{directory / TEXT} is not what was written", rule="load", help=_AGAIN)
    program = parse(text.decode("utf-8", errors="replace"), str(directory / TEXT))
    program.values = values
    _check_values(program, directory)
    return program


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise GraphftError(f"cannot save a program to {target}: it is a file", rule="save", help="name a directory")
    others = sorted({p.name for p in target.iterdir()} - {TEXT, VALUES}) if target.exists() else []
    if others:
        raise GraphftError(
            f"cannot save a program to {target}: the directory holds {', '.join(others[:3])}",
            rule="save",
            help="name a new directory, or one that holds a saved program and nothing else",
        )


def _check_text(text: str, program: Program) -> None:
    try:
        if parse(text) == program:
            return
        reason = "its text reads back as another program"
    except ParseError as error:
        reason = str(error)
    raise GraphftError(
        f"program '{program.name}' cannot be saved: {reason}",
        rule="save",
        help="graphft.ir.verify names what cannot be printed (rule unprintable)",
    )


def _check_dense(values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            what = "on device meta" if value.is_meta else f"{value.dtype}, {value.layout}"
            raise GraphftError(
                f"the value of %{name} cannot be saved: it is {what}",
                rule="save",
                help="give a dense tensor that holds data",
            )


def _replace(new: Path, target: Path, old: Path) -> None:
    """Renames `new` to `target`; what was there goes to `old`, and comes back if that fails."""
    if not target.exists():
        new.rename(target)
        return
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise


def _read(directory: Path, name: str, read: Callable[[Path], T]) -> T:
    try:
        return read(directory / name)
    except FileNotFoundError:
        if not directory.exists():
            what = f"there is no directory {directory}"
        else:
            found = ", ".join(sorted(p.name for p in directory.iterdir())[:5])
            what = f"{directory} holds no {name} (it holds {found or 'nothing'})"
        raise GraphftError(
            f"cannot load a program: {what}", rule="load", help="give the directory that Program.save wrote"
        ) from None
    except NotADirectoryError:
        raise GraphftError(
            f"cannot load a program: {directory} is a file",
            rule="load",
            help="give the directory that Program.save wrote",
        ) from None
    except OSError as error:
        raise GraphftError(
            f"cannot read {directory / name}: {error}", rule="load", help="check the file's permissions"
        ) from error


def _check_values(program: Program, directory: Path) -> None:
    from graphft.ir.diagnostics import Options
    from graphft.ir.rules import value_types

    for found in value_types(program, Options()):
        raise GraphftError(
            f"{directory / VALUES} does not fit {directory / TEXT}: {found.message}",
            rule="load",
            help="the two files belong to different programs: save the program again",
        )
