"""The operators of a validation: ranges of the held-out data, leased as chunks are, and a checkpoint's model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Type
from graphft.ir.registry import op
from graphft.ops.context import ChunkWork, Context


@op("etcd_get_range", infer=[Type("chunk")], effect=True)
def etcd_get_range(ctx: Context, *, timeout: float = 60.0, max_failures: int = 3) -> ChunkWork:
    """Returns the batch to compute now, of a range of the held-out data that this process has claimed.

    A claim hangs on its process's lease, and must be renewed by progress within `timeout` seconds. A range that cannot
    be computed `max_failures` times ends the job. Raises NoData when there is nothing to claim.
    """
    return ctx.validation.get_range(timeout, max_failures)


def _weights(operator: Operator, block: Block) -> list[Type]:
    names, variables = operator.attrs["names"], block.program.variables
    if missing := [name for name in names if name not in variables]:
        raise ProgramError(
            f"read_check_point gives %{missing[0]}, but the program has no variable of that name",
            block=block,
            rule="columns",
            help="name the results like the model's parameters and buffers",
        )
    return [variables[name].type for name in names]


@op("read_check_point", infer=_weights, effect=True)
def read_check_point(ctx: Context, chunk: ChunkWork, *, names: tuple[str, ...]) -> Sequence[Tensor] | Tensor:
    """Returns the model of the checkpoint that is validated, whole tensors in the order of `names`."""
    weights = ctx.validation.weights(names)
    return weights[0] if len(names) == 1 else weights


@op("etcd_complete_range", effect=True)
def etcd_complete_range(ctx: Context, chunk: ChunkWork, *results: Tensor) -> None:
    """Adds the results of a batch to its range: means, and those that have an entry for each record. With the last
    range, the validation is complete: block `reduce` runs, and the result is written."""
    ctx.validation.complete_range(chunk, results)
