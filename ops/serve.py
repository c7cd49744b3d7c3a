"""A pserver's operators: its flat buckets, its rounds, its checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from graphft.errors import ProgramError
from graphft.ir import Block, Operator, Ref
from graphft.ir.registry import attributes_of, op
from graphft.ops.context import Context, ServeOptions


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
