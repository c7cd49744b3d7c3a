"""Moving gradients to the pservers and parameters back; and the pservers' own operators.

A *bucket* is the unit that travels: slices of some tensors, of one dtype, one after the other (about 4 MB). `send`
stands right behind the op that produces the bucket's last gradient, `recv` before the first use of its parameters.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Ref
from graphft.ir.registry import attributes_of, op
from graphft.ops.context import Context, OnNonfinite, ServeOptions


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


def _one_dtype(operator: Operator, block: Block) -> None:
    dtypes = {block.program.variables[r.name].dtype for r in operator.args}
    if len(dtypes) > 1:
        raise ProgramError(
            f"a bucket holds one dtype, got {', '.join(sorted(dtypes))}",
            block=block,
            rule="bucket",
            help="put variables of different dtypes into different buckets",
        )


@op("bucket", check=_one_dtype, effect=True)
def bucket(
    ctx: Context, *variables: Ref, index: int, reduce: Literal["weighted_mean", "mean", "first"] = "weighted_mean"
) -> None:
    """Lays variables out in one flat buffer, the unit of push and pull.

    `reduce` says how the slots' contributions of a step are folded: gradients by `weighted_mean` (weights are samples),
    float buffers by `mean` over the slots with data, integer buffers take the `first`.
    """
    ctx.server.make_bucket(index, [v.name for v in variables], reduce)


@op("assign", writes=("target",))
def assign(ctx: Context, target: Tensor, value: Tensor) -> None:
    """target <- value, in place."""
    target.copy_(value)


@op("listen_and_serv", effect=True, attrs=attributes_of(ServeOptions))
def listen_and_serv(ctx: Context, **options: Any) -> None:
    """Serves one shard until the job is complete.

    Sync: step k closes when all `slots` contributions are in; they are reduced in slot order into `<variable>@GRAD`,
    and `schedule_block`, `reduce_block` (whose result is exchanged between shards) and each of `optimize_blocks` runs.
    Async: each batch is applied by itself, once; one that was computed from parameters older than `max_staleness`
    versions is refused (-1: none). If a contribution is not finite, `schedule_block` and `skip_block` run instead.

    `checkpoint_block` runs every `checkpoint_every` steps (0: only at the end), and with `checkpoint_passes` after
    every pass. `metrics` names the values of which this shard records the means.

    After each `validate_every` steps (0: never), or with `validate_passes` after every pass, a checkpoint is taken and
    its validation opened. With `scaled_rates`, the next step takes %rate_scale from what that has decided.

    With `recovery`, a restarted shard loads the newest committed checkpoint, and its first barrier has
    `recovery_timeout` seconds; when they pass, "rollback" raises the job's generation so that everyone goes back to the
    committed step, "proceed" closes the round with what is there. The mode ends after one round.
    """
    ctx.server.serve(ServeOptions(**options))


@op("load_check_point", effect=True)
def load_check_point(ctx: Context) -> None:
    """Fills the shard's variables from the newest committed checkpoint; leaves the initial values if there is none."""
    ctx.server.load_check_point()


@op("checkpoint_notify", effect=True)
def checkpoint_notify(ctx: Context, *, seconds: float = 30.0) -> None:
    """Has a checkpoint taken when the newest committed one is older than `seconds`. Sync: all shards at one step that
    the first to find it so writes to etcd."""
    ctx.server.notify_checkpoint(seconds)


@op("save_check_point", effect=True)
def save_check_point(ctx: Context, *variables: Ref, keep: int = 3) -> None:
    """Saves the variables as this shard's part of a checkpoint of the current version; a thread writes the file.

    The checkpoint exists when all shards have written and the manifest is committed; the newest `keep` stay.
    """
    ctx.server.save_check_point([v.name for v in variables], keep)
