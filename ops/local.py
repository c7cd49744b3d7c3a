"""Local accumulation: several batches of a chunk, a *unit*, between two pushes.

`local_steps` runs a block once per batch of the unit that the step got. Mode half_async adds the gradients of these
batches up, as Fluid's half-async communicator merges them (`max_merge_var_num`); mode geo_sgd evolves the trainer's own
copy of the parameters, and pushes by how much it moved, as Fluid's geo-SGD (`DistributeTranspilerConfig.geo_sgd_mode`,
`geo_sgd_need_push_nums`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Ref, Type
from graphft.ir.registry import op
from graphft.ops.context import ChunkWork, Context


def _other_block(operator: Operator, block: Block) -> None:
    name, blocks = operator.attrs["block"], block.program.blocks
    if name not in blocks or name == block.name:
        found = "its own" if name in blocks else "not there"
        raise ProgramError(
            f"local_steps runs block {name}, which is {found}",
            block=block,
            rule="local-block",
            help=f"the program's blocks are {', '.join(blocks)}",
        )
    if operator.attrs["count"] < 1:
        raise ProgramError(
            f"local_steps has count = {operator.attrs['count']}",
            block=block,
            rule="local-block",
            help="a unit has at least one batch",
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

    `variables` are what the block shares with this one, and may change: parameters, buffers, sums. Nothing of a unit
    is pushed before its last batch is computed: a trainer that dies inside one leaves no trace of it.
    """
    assert ctx.local is not None
    ctx.local.run_unit(unit, block, count)


@op("local_batch", infer=[Type("chunk")], effect=True)
def local_batch(ctx: Context, unit: ChunkWork) -> ChunkWork:
    """The batch of the unit that `local_steps` runs this block for."""
    assert ctx.local is not None
    return ctx.local.local_batch(unit)


@op("batch_number", infer=[Type("int64", ())])
def batch_number(ctx: Context, batch: ChunkWork) -> Tensor:
    """How many batches of the job were done before this one: the step that a schedule is a function of.

    Those that were applied when the unit's parameters were received, as the newest of the shards' versions tells, and
    those before it in the unit. So a schedule follows the whole job, also when trainers join or are started again.
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
