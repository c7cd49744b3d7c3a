"""Checks that a job's data has what the inputs of its program take: columns, dtypes, shapes, sizes of batches."""

from __future__ import annotations

import logging

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Kind, Program, Variable
from graphft.ir.literals import evaluate, names_in
from graphft.transpiler.config import JobConfig

log = logging.getLogger("graphft")


def check_columns(program: Program, config: JobConfig) -> None:
    """Raises GraphftError[columns] unless the data has the program's inputs, with their dtypes and shapes."""
    inputs = program.of_kind(Kind.INPUT)
    if not inputs:
        raise ProgramError(f"program '{program.name}' has no input", rule="columns", help="declare what a batch holds")
    for v in inputs:
        if v.name not in config.data.types:
            columns = ", ".join(config.data.columns)
            text = f"input %{v.name} is not in the data, whose columns are {columns}"
            raise _columns(text, "name the data's columns like the program's inputs")
        given, text = config.data.types[v.name], f"input %{v.name} is {v.type}, but the data's column is "
        if given.dtype != v.dtype:
            dtypes = f" (files(..., dtypes={{{v.name!r}: {v.dtype!r}}}))" if config.data.kind == "files" else ""
            help = f"convert the column to {v.dtype}{dtypes}, or declare the input as {given.dtype}"
            raise _columns(f"{text}{given}", help)
        _check_batch_dimension(v, config)
        wanted, shape = v.shape or (), given.shape or ()
        pairs = zip(wanted, shape, strict=False)
        if len(wanted) != len(shape) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
            raise _columns(f"{text}{given}", "reshape the column, or declare the input with the data's shape")


def _check_batch_dimension(v: Variable, config: JobConfig) -> None:
    if not v.shape:
        help = "give every input the samples along its first dimension"
        raise _columns(f"input %{v.name} has no batch dimension", help)
    size = v.shape[0]
    if isinstance(size, str) and names_in(size):
        return
    short = not config.drop_last and any(c.records % config.batch_size for c in config.data.chunks)
    if size != config.batch_size or short:
        other = "the last batch of a chunk is shorter" if short else f"batch_size is {config.batch_size}"
        help = "declare the dimension as None, or use this batch_size, and drop_last=True"
        raise _columns(f"input %{v.name} takes batches of {size}, and {other}", help)


def check_batch_sizes(program: Program, config: JobConfig) -> None:
    """Raises GraphftError[batch-size] if the program was not captured for a number of samples that a batch has."""
    batch = {v.shape[0] for v in program.of_kind(Kind.INPUT) if v.shape and isinstance(v.shape[0], str)}
    if len(batch) != 1:
        return
    (name,) = batch
    sizes: dict[int, int] = {}
    for chunk, info in enumerate(config.data.chunks):
        whole, rest = divmod(info.records, config.batch_size)
        for size in ([config.batch_size] if whole else []) + ([rest] if rest and not config.drop_last else []):
            sizes.setdefault(size, chunk)
    for condition, line in program.attrs.get("assume", ()):
        wrong = [n for n in sorted(sizes) if names_in(condition) == {name} and not evaluate(condition, {name: n})]
        if wrong:
            raise GraphftError(
                f"chunk {sizes[wrong[0]]} of the data has a batch of {wrong[0]} samples, but program '{program.name}' "
                f"was captured for {condition} only ({line} decides on it)",
                rule="batch-size",
                help="drop_last=True leaves short last batches out; or choose another batch_size, or another "
                "chunk_size of the data",
            )


def warn_of_unused(program: Program, config: JobConfig) -> None:
    """Warns of columns that no input reads, and of slots without a chunk: a chunk is one slot's."""
    if unread := sorted(config.data.types.keys() - {v.name for v in program.of_kind(Kind.INPUT)}):
        log.warning("no input of the program reads these columns of the data: %s", ", ".join(unread))
    chunks, slots = len(config.data.chunks), config.trainers
    if chunks < slots:
        what = "trainers is %d, but the data has only %d chunks: no more work at a time (chunk_size=%d makes %d)"
        log.warning(what, slots, chunks, -(-config.data.records // slots), slots)


def _columns(text: str, help: str) -> GraphftError:
    return GraphftError(text, rule="columns", help=help)
