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
    return batch[0] if len(columns) == 1 else batch


@op("seed_rng", effect=True)
def seed_rng(ctx: Context, chunk: ChunkWork) -> None:
    """Seeds torch's generator for this batch, so that any trainer that computes it draws the same numbers."""
    if ctx.device == "cpu":  # torch.manual_seed does this, and notes a stack trace for each kind of device not in use
        torch.default_generator.manual_seed(chunk.seed)
    else:
        torch.manual_seed(chunk.seed)


# -- several batches between two pushes ---------------------------------------------------------------------------


def _other_block(operator: Operator, block: Block) -> None:
    name, count, blocks = operator.attrs["block"], operator.attrs["count"], block.program.blocks
    if name not in blocks or name == block.name or count < 1:
        raise ProgramError(
            f"local_steps runs block {name} {count} times: expected another block, and at least one batch",
            block=block,
            rule="local-block",
            help=f"the program's blocks are {', '.join(blocks)}",
        )


def _same_type(operator: Operator, block: Block) -> None:
    target, value = (block.program.variables[r.name] for r in operator.args[:2])
    if target.type != value.type:
        raise ProgramError(
            f"{operator.type}: {target.ref} is {target.type}, but {value.ref} is {value.type}",
            block=block,
            rule="local-operand",
            help="both have the parameter's shape and dtype",
        )


@op("local_steps", check=_other_block, writes=("variables",), effect=True)
def local_steps(ctx: Context, unit: ChunkWork, *variables: Ref, block: str, count: int) -> None:
    """Runs `block` once for each batch of the unit, in order: up to `count` consecutive batches of one chunk.

    Mode half_async adds the gradients of these batches up, as Fluid's half-async communicator merges them; mode geo_sgd
    evolves the trainer's own copy of the parameters, and pushes by how much it moved, as Fluid's geo-SGD.

    `variables` are what the block shares with this one, and may change: parameters, buffers, sums. Nothing of a unit
    is pushed before its last batch is computed: a trainer that dies inside one leaves no trace of it.
    """
    ctx.local.run_unit(unit, block, count)


@op("local_batch", infer=[Type("chunk")], effect=True)
def local_batch(ctx: Context, unit: ChunkWork) -> ChunkWork:
    """Returns the batch of the unit that `local_steps` runs this block for."""
    return ctx.local.local_batch(unit)


@op("batch_number", infer=[Type("int64", ())])
def batch_number(ctx: Context, batch: ChunkWork) -> Tensor:
    """Returns how many batches of the job were done before this one: the step that a schedule is a function of.

    These are the batches that were applied when the unit's parameters were received, as the newest of the shards'
    versions tells, and those before it in the unit. So a schedule follows the whole job, also after restarts.
    """
    return torch.tensor(batch.number, dtype=torch.int64, device=ctx.device)


@op("accumulate", check=_same_type, writes=("mean",))
def accumulate(ctx: Context, mean: Tensor, grad: Tensor, batch: ChunkWork, unit: ChunkWork) -> None:
    """mean <- mean + grad * (samples of the batch / samples of the unit): at the unit's end, its samples' mean."""
    mean.add_(grad * (batch.samples / unit.samples))


@op("apply_delta", check=_same_type, writes=("param",))
def apply_delta(ctx: Context, param: Tensor, delta: Tensor, *, scale: float) -> None:
    """param <- param + delta * scale, of what a trainer's local steps made of its copy. Geo-SGD: 1 / trainers."""
    param.add_(delta * scale)
