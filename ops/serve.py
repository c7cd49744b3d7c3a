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
    """Lays variables out in one flat buffer, the unit of push and pull. Runs in `init`.

    `reduce` says how listen_and_serv folds the slots' contributions of a step: gradients by `weighted_mean`
    (weights are samples), float buffers by `mean` over the slots with data, integer buffers take the `first`.
    """
    ctx.server.make_bucket(index, [v.name for v in variables], reduce)


@op("assign", writes=("target",))
def assign(ctx: Context, target: Tensor, value: Tensor) -> None:
    """target <- value, in place."""
    target.copy_(value)


@op("listen_and_serv", effect=True, attrs=attributes_of(ServeOptions))
def listen_and_serv(ctx: Context, **options: Any) -> None:
    """Serves one shard until the job is complete.

    Sync: step k closes when all `slots` contributions of k are in; then, in slot order, they are reduced bucket by
    bucket into `<variable>@GRAD`, and `schedule_block`, `reduce_block` (whose result is exchanged between shards)
    and every one of `optimize_blocks` runs; the version becomes k + 1. Async: each batch is reduced and applied by
    itself, once; what was computed from parameters older than `max_staleness` versions is refused (-1: nothing is).
    A step (async: a batch) of which a contribution is not finite changes no parameter, optimizer state or buffer:
    `schedule_block` and `skip_block` run instead. Without a `skip_block`, such contributions are refused.
    Every `checkpoint_every` steps (0: only at the end) `checkpoint_block` runs; with `checkpoint_passes` at the end of
    every pass, too. A slot of which nothing came for `idle_timeout` seconds is taken from its trainer (0: never).

    `metrics` names the values that contributions report to this shard. It records their means, weighted by samples: a
    row of the job's table for each step, and at the end of each pass `/<job>.metrics/<pass>`.

    After each `validate_every` steps and at the end (0: never), or with `validate_passes` at the end of every pass,
    `checkpoint_block` runs, too, and the shard that commits that checkpoint opens its validation at
    `/<job>/validating/<step>`. The job is complete when none is open. With `scaled_rates`, the first step behind such
    a one takes %rate_scale from what it has decided, `/<job>/decided`.

    With `recovery`, a restarted shard loads the newest committed checkpoint, and its first barrier has
    `recovery_timeout` seconds; when they pass, "rollback" raises the job's generation so that everyone meets again
    at the committed step, "proceed" closes the round with what is there. The mode ends after one round.
    """
    ctx.server.serve(ServeOptions(**options))


@op("load_check_point", effect=True)
def load_check_point(ctx: Context) -> None:
    """Fills the shard's variables from the newest committed checkpoint; leaves the initial values if there is none."""
    ctx.server.load_check_point()


@op("checkpoint_notify", effect=True)
def checkpoint_notify(ctx: Context, *, seconds: float = 30.0) -> None:
    """Has a checkpoint taken when the newest committed one is older than `seconds`, also after a fault. In `daemon`.

    Sync: the first shard to find it so writes to etcd at which step, a little ahead of all; every shard reads that and
    takes its part when it gets there. Async: each shard takes its own.
    """
    ctx.server.notify_checkpoint(seconds)


@op("save_check_point", effect=True)
def save_check_point(ctx: Context, *variables: Ref, keep: int = 3) -> None:
    """Saves the variables as this shard's part of a checkpoint of the current version.

    Copies them in memory and returns; a thread writes the file. The checkpoint exists when all shards have written
    and the manifest is committed; the newest `keep` stay.
    """
    ctx.server.save_check_point([v.name for v in variables], keep)
