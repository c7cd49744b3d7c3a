"""Programs on disk: a directory with `program.gft` (text) and `values.safetensors` (initial values). No pickle.

A directory is written beside its final place and renamed into it: readers see the old one or the new one, whole.
Values have checksums. So has the text of a program that is saved `sealed`; that of others may be edited.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from graphft.disk.fileio import fsync
from graphft.disk.tensor_file import checksum_of, read_tensors, write_tensors
from graphft.errors import GraphftError
from graphft.ir import Program
from graphft.ir.parser import ParseError, parse
from graphft.ir.printer import format_program
from graphft.ir.verify import value_types

TEXT = "program.gft"
VALUES = "values.safetensors"
_SEAL = "text"
"""In the metadata of the values: the checksum of a sealed text."""
_AGAIN = "save the program again, or copy the folder again"


def save_program(program: Program, path: str | os.PathLike[str], *, sealed: bool = False) -> None:
    """Writes `program` into directory `path`, replacing the program that is there. `sealed`: its text is not edited.

    Raises GraphftError, and leaves `path` as it was, when the program does not read back, a value cannot be saved,
    or `path` holds anything but a saved program.
    """
    target, text = Path(path).absolute(), format_program(program)
    _check_target(target)
    _check_text(text, program)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            new, old = Path(scratch, "new"), Path(scratch, "old")
            new.mkdir()
            (new / TEXT).write_text(text, encoding="utf-8", newline="\n")
            write_tensors(new / VALUES, program.values, {_SEAL: checksum_of(text.encode())} if sealed else None)
            for item in (new / TEXT, new / VALUES, new):
                fsync(item)
            if target.exists():
                target.rename(old)
            try:
                new.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
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
    try:
        text = (directory / TEXT).read_bytes()
        values, metadata = read_tensors(directory / VALUES)
    except OSError as error:
        raise GraphftError(
            f"cannot load a program from {directory}: {error}",
            rule="load",
            help=f"give the directory that save_program wrote, with {TEXT} and {VALUES}",
        ) from error
    except GraphftError as error:
        raise GraphftError(f"{directory / VALUES} is damaged: {error.message}", rule="load", help=_AGAIN) from error
    if metadata.get(_SEAL, checksum := checksum_of(text)) != checksum:
        raise GraphftError(f"{directory / TEXT} is not what was written", rule="load", help=_AGAIN)
    program = parse(text.decode("utf-8", errors="replace"), str(directory / TEXT))
    program.values = values
    for found in value_types(program):
        raise GraphftError(
            f"{directory / VALUES} does not fit {directory / TEXT}: {found.message}", rule="load", help=_AGAIN
        )
    return program


def _check_target(target: Path) -> None:
    others = sorted({p.name for p in target.iterdir()} - {TEXT, VALUES}) if target.is_dir() else []
    if others or (target.exists() and not target.is_dir()):
        what = f"the directory holds {', '.join(others[:3])}" if others else "it is a file"
        raise GraphftError(
            f"cannot save a program to {target}: {what}",
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
        help="names have letters, digits and _ . @ / -; values are None, bool, int, float, str, Sym, Ref or tuples",
    )
