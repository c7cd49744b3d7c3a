"""Moving gradients to the pservers and parameters back.

A *bucket* is the unit that travels: slices of some tensors, of one dtype, one after the other (about 4 MB). `send`
stands right behind the op that produces the bucket's last gradient, `recv` before the first use of its parameters.
"""

from __future__ import annotations

from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator
from graphft.ir.registry import op
from graphft.ops.context import Context, OnNonfinite


def _check_slices(operator: Operator, block: Block) -> None:
    slices = operator.attrs["slices"]
    sizes = [block.program.variables[ref.name].type.numel for ref in operator.args]
    if len(slices) != len(sizes) or any(
        not 0 <= start < end or (numel is not None and end > max(numel, 1))
        for numel, (start, end) in zip(sizes, slices, strict=True)
    ):
        raise ProgramError(
            f"{operator.type} has slices {slices} of operands of {sizes} elements",
            block=block,
            rule="slices",
            help="give one (start, end) range of flat elements per operand, inside of it",
        )


@op("send", check=_check_slices, effect=True)
def send(
    ctx: Context, *tensors: Tensor, shard: int, bucket: int, slices: tuple[tuple[int, int], ...], check: bool = False
) -> None:
    """Pushes one bucket of this (step, slot)'s contribution to a pserver.

    Operands are gradients, or buffers after their update. `slices` gives the [start, end) of each one's flat
    elements. Returns at once. `check`: the contribution is not finite if a value of the bucket is not.
    """
    ctx.comm.push(shard, bucket, tensors, slices, check)


@op("check_finite", effect=True)
def check_finite(ctx: Context, loss: Tensor) -> None:
    """The contribution of this (step, slot) is not finite if its loss is not (of a unit: the loss of any batch)."""
    ctx.comm.check_loss(loss)


@op("report_metrics", effect=True)
def report_metrics(ctx: Context, *values: Tensor) -> None:
    """Gives the loss and the metrics of a batch, one float each, to its contribution, for shard 0. Of a unit's batches
    these are the means over its samples."""
    ctx.comm.report(values)


@op("send_barrier", effect=True)
def send_barrier(
    ctx: Context, *, shards: int, push_timeout: float = 0.0, max_skipped: int = -1, on_nonfinite: OnNonfinite = "warn"
) -> None:
    """Ends the sends of one (step, slot) to `shards` shards. With nothing sent, the contribution is "empty".

    Async: ends the sends of one batch, and waits until every shard has applied it. A shard that does not answer within
    `push_timeout` seconds is skipped, and gets the batch later, before the chunk is completed; one that was skipped
    for `max_skipped` batches is waited for instead (-1: never).

    `on_nonfinite` is for a contribution that is not finite. "stop": it is not sent, and the job fails. "skip": every
    shard runs its skip block instead of its optimize blocks, for the whole step. "warn": only the loss is looked at.
    """
    ctx.comm.end_push(shards, push_timeout, max_skipped, on_nonfinite)


@op("recv", check=_check_slices, writes=("tensors",), effect=True)
def recv(
    ctx: Context, *tensors: Tensor, shard: int, bucket: int, slices: tuple[tuple[int, int], ...], refresh: bool = False
) -> None:
    """Waits for one bucket at the version of this step, and writes it into the operands.

    A bucket that is there already is not copied again, unless `refresh`. Raises WorkChanged when the work changed.
    """
    ctx.comm.pull(shard, bucket, tensors, slices, refresh)


@op("fetch_barrier", effect=True)
def fetch_barrier(ctx: Context, *, shards: int) -> None:
    """Ends the receives of one step: waits until `shards` shards have reached it (async: have answered)."""
    ctx.comm.end_pull(shards)
