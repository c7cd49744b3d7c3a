"""Batches: reading one, seeding the step that computes it, and computing several (a *unit*) between two pushes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Kind, Operator, Ref, Type
from graphft.ir.registry import op
from graphft.ops.context import ChunkWork, Context


def _columns(operator: Operator, block: Block) -> list[Type]:
    declared = {v.name: v.type for v in block.program.of_kind(Kind.INPUT)}
    if missing := [column for column in operator.attrs["columns"] if column not in declared]:
        raise ProgramError(
            f"read_chunk gives column {missing[0]}, but the program has no input of that name",
            block=block,
            rule="columns",
            help="name the data's columns like the program's inputs",
        )
    return [declared[column] for column in operator.attrs["columns"]]


@op("read_chunk", infer=_columns, effect=True)
def read_chunk(ctx: Context, chunk: ChunkWork, *, columns: tuple[str, ...]) -> Sequence[Tensor] | Tensor:
    """Reads the batch's columns, in order; prefetched while the step before was computed."""
    batch = ctx.data.batch(chunk, columns)
    if ctx.device != "cpu":  # pinned, so that the copy waits for nothing
        batch = [values.pin_memory().to(ctx.device, non_blocking=True) for values in batch]
    return batch[0] if len(columns) == 1 else batch


@op("seed_rng", effect=True)
def seed_rng(ctx: Context, chunk: ChunkWork) -> None:
    """Seeds torch's generator for this batch, so that any trainer that computes it draws the same numbers."""
    if ctx.device == "cpu":  # torch.manual_seed does this, and notes a stack trace for each kind of device not in use
        torch.default_generator.manual_seed(chunk.seed)
    else:
        torch.manual_seed(chunk.seed)


# -- several batches between two pushes ---------------------------------------------------------------------------


def one_type(operator: Operator, block: Block) -> None:
    """Raises ProgramError[operand-type] unless all operands that are tensors have the type of the first one."""
    variables = [block.program.variables[ref.name] for ref in operator.args]
    if other := [v for v in variables if v.type.is_tensor and v.type != variables[0].type]:
        raise ProgramError(
            f"{operator.type}: {variables[0]}, but {other[0]}",
            block=block,
            rule="operand-type",
            help="all have the parameter's shape and dtype",
        )


@op("local_steps", writes=("variables",), effect=True)
def local_steps(ctx: Context, unit: ChunkWork, *variables: Ref, block: str, count: int) -> None:
    """Runs `block` once for each batch of the unit, in order: up to `count` consecutive batches of one chunk.

    Mode half_async adds the gradients of these batches up; mode geo_sgd evolves the trainer's own copy of the
    parameters, and pushes by how much it moved. `variables` are what the block shares with this one, and may change.
    """
    ctx.local.run_unit(unit, block, count)


@op("local_batch", infer=[Type("chunk")], effect=True)
def local_batch(ctx: Context, unit: ChunkWork) -> ChunkWork:
    """Returns the batch of the unit that `local_steps` runs this block for."""
    return ctx.local.local_batch(unit)


@op("batch_number", infer=[Type("int64", ())])
def batch_number(ctx: Context, batch: ChunkWork) -> Tensor:
    """Returns how many batches of the job were done before this one: the step that a schedule is a function of."""
    return torch.tensor(batch.number, dtype=torch.int64, device=ctx.device)


@op("accumulate", check=one_type, writes=("mean",))
def accumulate(ctx: Context, mean: Tensor, grad: Tensor, batch: ChunkWork, unit: ChunkWork) -> None:
    """mean <- mean + grad * (samples of the batch / samples of the unit): at the unit's end, its samples' mean."""
    mean.add_(grad * (batch.samples / unit.samples))


@op("apply_delta", check=one_type, writes=("param",))
def apply_delta(ctx: Context, param: Tensor, delta: Tensor, *, scale: float) -> None:
    """param <- param + delta * scale, of what a trainer's local steps made of its copy. Geo-SGD: 1 / trainers."""
    param.add_(delta * scale)
