"""Schedules of faults: a function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from graphft.errors import GraphftError

T = TypeVar("T")

WEIGHTS = {
    "kill-trainer": 5,
    "kill-pserver": 5,
    "kill-trainers": 2,
    "kill-pservers": 2,
    "kill-job": 2,
    "kill-etcd": 3,
    "pause-trainer": 3,
    "pause-pserver": 3,
    "pause-etcd": 2,
    "freeze-trainer": 1,
    "freeze-pserver": 1,
    "freeze-etcd": 1,
}
"""Kinds of faults, and how often each is drawn.

kill: SIGKILL; with a plural, of all of them at once; kill-job: of the launcher with all roles and etcd, after which the
job is launched again. pause and freeze: SIGSTOP, then SIGCONT before or after the lease has ended.
"""

COORDINATOR_WEIGHTS = {"kill-coordinator": 10, "kill-coordinators": 4, "pause-coordinator": 2, "freeze-coordinator": 2}
"""Only of a job whose tasks a coordinator gives out. They befall the one that serves twice out of three times."""

EARLY, LATE = 0.02, 0.95
"""Shares of the job's steps between which faults are spread."""
DURING_RECOVERY = 0.2
"""The share of the faults that do not wait for the job to have recovered from the one before."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It comes when the job has recovered and reached `step`; or, when `after` is not None, so many seconds
    after the fault before, which the job need not have recovered from.

    `target` in [0, 1) picks among the live processes; `seconds` is how long a pause or freeze lasts, or etcd is away.
    """

    kind: str
    step: int
    after: float | None
    target: float
    seconds: float

    def pick(self, candidates: Sequence[T]) -> T:
        return candidates[int(self.target * len(candidates))]


def kinds_of(wanted: Sequence[str], coordinator: bool = False) -> tuple[str, ...]:
    """Returns the kinds that are asked for (none: all). Raises GraphftError for one that is not possible
    without a `coordinator`."""
    possible = WEIGHTS | (COORDINATOR_WEIGHTS if coordinator else {})
    unknown = [k for k in wanted if k not in possible]
    if unknown:
        raise GraphftError(
            f"there is no kind of fault {unknown[0]!r}", rule="chaos-kind", help=f"kinds are {', '.join(possible)}"
        )
    return tuple(wanted or possible)


def make_schedule(seed: int, count: int, kinds: Sequence[str], total_steps: int, lease_ttl: float) -> list[Fault]:
    """`count` faults over the job's steps, each kind at least once if there is room for all."""
    weights = {k: w for k, w in (WEIGHTS | COORDINATOR_WEIGHTS).items() if k in kinds}
    if not weights or not count:
        return []
    rng = random.Random(seed)
    drawn = (
        [*weights, *rng.choices(list(weights), list(weights.values()), k=count)][:count]
        if count >= len(weights)
        else rng.sample(list(weights), count)
    )
    rng.shuffle(drawn)
    steps = sorted(rng.randint(int(EARLY * total_steps), int(LATE * total_steps)) for _ in drawn)
    faults = []
    for i, (kind, step) in enumerate(zip(drawn, steps, strict=True)):
        soon, after = rng.random() < DURING_RECOVERY, rng.uniform(0.0, 3.0)
        target, share = rng.random(), rng.random()
        lasts = {"freeze": lease_ttl * (1.1 + 0.3 * share), "pause": lease_ttl * (0.03 + 0.3 * share)}
        seconds = lasts.get(kind.partition("-")[0], 0.5 + 3.0 * share)
        faults.append(Fault(kind, step, after if soon and i else None, target, seconds))
    return faults
