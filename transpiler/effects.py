"""Which options have an effect only in some jobs: given elsewhere, they are refused, and not ignored in silence.

Those that only lack `ft` are told and nothing more: a script that is run with it and without it has them in both cases.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

log = logging.getLogger("graphft")


@dataclass(frozen=True, slots=True)
class Needs:
    """What options have to be for another one to have an effect: any of `values`. `why`: it has none otherwise.
    `refused`: to give that one all the same is an error."""

    option: str
    values: tuple[Any, ...]
    why: str
    refused: bool = True

    def met(self, config: JobConfig) -> bool:
        return getattr(config, self.option) in self.values


_ENDS = "without fault tolerance the job ends at the first death or bad batch, and is never resumed"
_FT = Needs("ft", (True,), _ENDS, refused=False)
_STORED = Needs("ft", (True,), "without fault tolerance there are no checkpoints to put there")
_QUEUE = Needs(
    "ft", (True,), "without fault tolerance each trainer works on its share of the plan, and nothing is queued"
)
_RESUMED = Needs("ft", (True,), "without fault tolerance a job has no checkpoints at which it could wait")
_VALIDATES = Needs("ft", (True,), "without fault tolerance there are no checkpoints to validate")
_STEPS = Needs("sync", (True,), "an async job's shards are each at batches of their own: no pass ends for all at once")
_SYNC = Needs("sync", (True,), "no process waits for all trainers in async mode")
_ASYNC = Needs("sync", (False,), "a sync step waits for every shard, and has no stale gradients")
_DC_ASGD = Needs("mode", ("dc_asgd",), "no other mode compensates the delay of gradients")
_DISCARD = Needs("on_bad_data", ("discard",), "nothing is left out: the job ends at the first bad batch")

NEEDS: dict[str, tuple[Needs, ...]] = {
    "dc_lambda": (_ASYNC, _DC_ASGD),
    "dc_decay": (_ASYNC, _DC_ASGD),
    "storage": (_STORED,),
    "dispatch": (_QUEUE,),
    "passes_on_demand": (_RESUMED, _STEPS),
    "validate": (_VALIDATES, _STEPS),
    "checkpoint_every": (_FT,),
    "checkpoint_seconds": (_FT,),
    "keep_checkpoints": (_FT,),
    "on_trainer_loss": (_FT, _SYNC),
    "on_barrier_timeout": (_FT, _SYNC),
    "recovery_timeout": (_FT, _SYNC),
    "chunk_timeout": (_FT,),
    "max_failures": (_FT,),
    "on_bad_data": (_FT,),
    "max_discarded": (_FT, _DISCARD),
    "lease_ttl": (_FT,),
    "push_timeout": (_ASYNC,),
    "max_skipped": (_ASYNC,),
    "max_staleness": (_ASYNC,),
}
"""By option. Those that are not here have an effect in every job; `mode` and `local_steps` are `JobConfig`'s matter."""


def check_effects(config: JobConfig, given: Iterable[str]) -> None:
    """Raises UsageError[option] if one of the options that are `given` has no effect in this job; or warns.

    Its default may be given: nothing is lost by it, and a script may pass on what its own options say. Saved jobs are
    not looked at: they go on as they were begun.
    """
    for name in given:
        if getattr(config, name) == getattr(type(config), name, None):
            continue
        for need in NEEDS.get(name, ()):
            if not need.met(config):
                _tell(name, need, config)


def _tell(name: str, need: Needs, config: JobConfig) -> None:
    what = (
        f"{name} is {getattr(config, name)!r}, which has no effect: {need.option} is "
        f"{getattr(config, need.option)!r} ({need.why})"
    )
    if not need.refused:
        log.warning("%s", what)
        return
    wanted = " or ".join(map(repr, need.values))
    raise UsageError(what, rule="option", help=f"leave {name} out, or transpile with {need.option}={wanted}")
