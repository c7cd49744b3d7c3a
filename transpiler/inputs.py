"""Checks that data has what the inputs of a program take: columns, dtypes, shapes, sizes of batches."""

from __future__ import annotations

from collections.abc import Iterable

from graphft.data import DataSpec
from graphft.errors import GraphftError, UsageError
from graphft.ir import Program, Variable
from graphft.ir.literals import evaluate, names_in


def check_columns(inputs: Iterable[Variable], data: DataSpec) -> None:
    """Raises UsageError[columns] unless the data has these inputs, with their dtypes and shapes."""
    for v in inputs:
        if v.name not in data.types:
            text = f"input {v.name} ({v.type}) is not in the data, which has {', '.join(data.types)}"
            raise _columns(text, "name the data's columns like the program's inputs")
        given = data.types[v.name]
        wanted, shape = v.shape or (), given.shape or ()
        if not wanted:
            raise _columns(f"input {v.name} has no batch dimension", "its first dimension is that of the records")
        if given.dtype != v.dtype:
            help = f"convert the column to {v.dtype}"
            if data.kind == "files":
                help += f": files(..., dtypes={{{v.name!r}: {v.dtype!r}}})"
        elif len(wanted) != len(shape) or any(
            isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(wanted, shape, strict=True)
        ):
            help = "reshape the column, or build the program with the data's shape"
        else:
            continue
        raise _columns(f"input {v.name} is {v.type}, but the data's column is {given}", help)


def check_batches(program: Program, inputs: Iterable[Variable], data: DataSpec, size: int, drop_last: bool) -> None:
    """Raises GraphftError[batch-size] if the program takes no batches as the data has in batches of `size`."""
    batches: dict[int, int] = {}
    for chunk, info in enumerate(data.chunks):
        whole, rest = divmod(info.records, size)
        for records in [size] * bool(whole) + [rest] * (bool(rest) and not drop_last):
            batches.setdefault(records, chunk)
    for records in sorted(batches):
        if only := refused(program, inputs, records):
            raise GraphftError(
                f"chunk {batches[records]} of the data has a batch of {records} samples, but program "
                f"'{program.name}' was captured for {only} only",
                rule="batch-size",
                help="drop_last=True leaves short last batches out; or choose another batch_size or chunk_size",
            )


def refused(program: Program, inputs: Iterable[Variable], records: int) -> str:
    """Returns what the program was captured for, where a batch of so many records is none of it; else ""."""
    for dim in {v.shape[0] for v in inputs}:
        if isinstance(dim, int) and dim != records:
            return f"batches of {dim}"
        for condition, line in program.attrs.get("assume", ()):
            if names_in(condition) == {dim} and not evaluate(condition, {str(dim): records}):
                return f"{condition} ({line} decides on it)"
    return ""


def _columns(text: str, help: str) -> UsageError:
    return UsageError(text, rule="columns", help=help)
