"""Batches that a program was captured for: a shorter one is filled up with copies of its last record."""

from __future__ import annotations

import torch
from torch import Tensor

from graphft.errors import UsageError
from graphft.ir import Kind, Program
from graphft.literals import evaluate, names_in
from graphft.option_names import is_whole


def check_batch_size(program: Program, size: int) -> None:
    """Raises UsageError if the program was not captured for batches of so many records."""
    if not is_whole(size, 1):
        raise UsageError(
            f"batch_size is {size!r}, expected a number, 1 or more", rule="batch-size", help="leave it out"
        )
    if (fixed := _fixed(program)) not in (0, size):
        raise UsageError(
            f"the program was captured for batches of {fixed}, batch_size is {size}",
            rule="batch-size",
            help="leave batch_size out",
        )
    if refused := _refused(program, size):
        raise UsageError(
            f"the program was not captured for batches of {size}, but for {refused} only",
            rule="batch-size",
            help="choose another batch_size",
        )


def default_size(program: Program, trained_with: int) -> int:
    """As the job was trained with, which is known to fit in the memory; or the only one that can be."""
    return _fixed(program) or trained_with


def filled(program: Program, columns: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The columns as they are, if the program was captured for so many records; else filled up to `size`."""
    records = len(next(iter(columns.values())))
    if _fixed(program) in (0, records) and not _refused(program, records):
        return columns
    return {n: torch.cat([c, c[-1:].expand(size - records, *c.shape[1:])]) for n, c in columns.items()}


def _fixed(program: Program) -> int:
    """The size of each batch; 0: it may be any."""
    dim = program.of_kind(Kind.INPUT)[0].shape[0]
    return dim if isinstance(dim, int) else 0


def _refused(program: Program, size: int) -> str:
    """The condition that batches of this size do not fulfil; "": none."""
    name = program.of_kind(Kind.INPUT)[0].shape[0]
    conditions = [str(c) for c, _ in program.attrs.get("assume", ())]
    return next((c for c in conditions if names_in(c) == {name} and not evaluate(c, {str(name): size})), "")
