"""Programs on disk: a directory with `program.gft` (text) and `values.safetensors` (initial values). No pickle.

A directory is written beside its final place and renamed into it: readers see the old one or the new one, whole.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from graphft.errors import GraphftError
from graphft.fileio import fsync, read_regular
from graphft.ir import Program
from graphft.parser import ParseError, parse
from graphft.printer import format_program

TEXT = "program.gft"
VALUES = "values.safetensors"


def save_program(program: Program, path: str | os.PathLike[str]) -> None:
    """Writes `program` into directory `path`, replacing the program that is there.

    Raises GraphftError, and leaves `path` as it was, when the program does not read back, a value cannot be saved,
    or `path` holds anything but a saved program.
    """
    target = Path(path).absolute()
    _check_target(target)
    text = format_program(program)
    _check_text(text, program)
    values = _savable(program.values)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            (new / TEXT).write_text(text, encoding="utf-8", newline="\n")
            save_file(values, new / VALUES)
            for item in (new / TEXT, new / VALUES, new):
                fsync(item)
            _replace(new, target, Path(scratch, "old"))
        fsync(target.parent)
    except KeyError as error:  # safetensors' way of saying so
        raise GraphftError(
            f"program '{program.name}' cannot be saved: safetensors has no dtype {error}",
            rule="save",
            help="convert the value to another dtype",
        ) from error
    except (OSError, SafetensorError) as error:
        raise GraphftError(
            f"cannot save program '{program.name}' to {target}: {error}",
            rule="save",
            help="check that the folder above can be written, and has room",
        ) from error


def load_program(path: str | os.PathLike[str]) -> Program:
    """The program in directory `path`. Raises GraphftError for files that are missing, damaged or do not fit."""
    directory = Path(path)
    text = _read(directory, TEXT).decode("utf-8", errors="replace")
    program = parse(text, str(directory / TEXT))
    data = _read(directory, VALUES)
    try:
        program.values = load(data)
    except (SafetensorError, ValueError) as error:
        raise GraphftError(
            f"{directory / VALUES} is damaged: {error}",
            rule="load",
            help="save the program again, or copy the file again: it may be truncated",
        ) from error
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
        help="graphft.verify names what cannot be printed (rule unprintable)",
    )


def _savable(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values as dense CPU tensors, copied where they are views or share memory: safetensors takes neither."""
    seen: set[int] = set()
    savable: dict[str, Tensor] = {}
    for name, value in values.items():
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            what = "on device meta" if value.is_meta else f"{value.dtype}, {value.layout}"
            raise GraphftError(
                f"the value of %{name} cannot be saved: it is {what}",
                rule="save",
                help="give a dense tensor that holds data",
            )
        tensor = value.detach().cpu()
        storage = tensor.untyped_storage()
        whole = tensor.is_contiguous() and storage.nbytes() == tensor.numel() * tensor.element_size()
        if not whole or storage.data_ptr() in seen:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(storage.data_ptr())
        savable[name] = tensor
    return savable


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


def _read(directory: Path, name: str) -> bytes:
    try:
        return read_regular(directory / name)
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
    from graphft.diagnostics import Options
    from graphft.rules import value_types

    for found in value_types(program, Options()):
        raise GraphftError(
            f"{directory / VALUES} does not fit {directory / TEXT}: {found.message}",
            rule="load",
            help="the two files belong to different programs: save the program again",
        )
