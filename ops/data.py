"""Reading a batch, and seeding the step that computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Operator, Type
from graphft.ir.registry import op
from graphft.ops.context import ChunkWork, Context


def _columns(operator: Operator, block: Block) -> list[Type]:
    types = []
    for column in operator.attrs["columns"]:
        var = block.program.variables.get(column)
        if var is None or var.kind is not Kind.INPUT:
            raise ProgramError(
                f"read_chunk gives column {column}, but the program has no input of that name",
                block=block,
                rule="columns",
                help="name the data's columns like the program's inputs",
            )
        types.append(var.type)
    return types


@op("read_chunk", infer=_columns, effect=True)
def read_chunk(ctx: Context, chunk: ChunkWork, *, columns: tuple[str, ...]) -> Sequence[Tensor] | Tensor:
    """Reads the batch's columns, in order; prefetched while the step before was computed."""
    assert ctx.data is not None
    batch = ctx.data.batch(chunk, columns)
    return batch[0] if len(columns) == 1 else batch


@op("seed_rng", effect=True)
def seed_rng(ctx: Context, chunk: ChunkWork) -> None:
    """Seeds torch's generator for this batch, so that any trainer that computes it draws the same numbers."""
    if ctx.device == "cpu":  # torch.manual_seed does this, and notes a stack trace for each kind of device not in use
        torch.default_generator.manual_seed(chunk.seed)
    else:
        torch.manual_seed(chunk.seed)
