"""Accounts for a job's time: each second since its run began belongs to exactly one category.

    ledger = TimeLedger(began)
    ledger.step(seen, now)      # at each look at the job, some times a second
    ledger.seconds              # by category; they add up to `ledger.wall`

A look has the job's step, its members, and what trainers count of their own time. What training waited for is taken off
as the trainers count it; the rest of the time in which a job trains are steps, new ones or, after a rollback, repeated
ones. While a job recovers, or waits for validations, all time is that, but for what the steps take at their usual pace.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

WINDOW_SECONDS = 60.0
"""The pace is that of the last minute of training; where steps take longer, that of the last two steps."""


class StepPace:
    """Steps per second of training; time in which a job does not train changes nothing."""

    def __init__(self) -> None:
        self._rises: deque[tuple[float, int]] = deque()
        """Looks at which there were new steps: the seconds since the one before, and how many."""
        self._since = 0.0

    def train(self, seconds: float, steps: int) -> None:
        """Adds an interval of training, in which so many steps ended."""
        self._since += seconds
        if steps:
            self._rises.append((self._since, steps))
            self._since = 0.0
        while len(self._rises) > 2 and sum(s for s, _ in self._rises) - self._rises[0][0] >= WINDOW_SECONDS:
            self._rises.popleft()

    @property
    def per_second(self) -> float:
        """The pace; 0 before the first step. It falls when a step takes longer than the one before."""
        if not self._rises:
            return 0.0
        late = max(0.0, self._since - self._rises[-1][0])
        return sum(steps for _, steps in self._rises) / (sum(s for s, _ in self._rises) + late or math.inf)


def in_words(seconds: float) -> str:
    """Returns a text such as "45 s", "12 min", "3 h 05 min", "2 d 04 h"."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24:02} h"


Category = Literal[
    "productive", "redone", "checkpointing", "validating", "data", "straggler", "recovering", "starting", "idle"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
Mode = Literal["starting", "training", "recovering", "checkpointing", "validating", "idle", "over"]
WAITS_SECONDS = 5.0
"""Waits of trainers are taken over such a time, since they report at different moments."""
GAP_SECONDS = 60.0
"""After so long without a look it is unknown what the job did: its launcher was stopped, or the machine slept."""
SHORT_SECONDS = 10.0
"""A shorter run has no goodput: most of its steps are made before their pace is known."""
RECOVERIES = 50
"""The newest that are kept."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. `step`: reached by all shards. `members`: ids of the registered trainers and pservers; `whole`: every
    shard is. `waits`: for its next pass, or for an engine without room. `cut_off`: a trainer does not reach a shard.
    `over`: complete or failed. `validates`: its next step waits for a validation.

    `trainers`: by id, seconds since it began by activity; `checkpoints`: by shard, seconds for which steps waited for
    checkpoints.
    """

    step: int
    total_steps: int | None = None
    generation: int = 0
    members: frozenset[str] = frozenset()
    whole: bool = True
    waits: bool = False
    cut_off: bool = False
    over: bool = False
    trainers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    checkpoints: Mapping[str, float] = field(default_factory=dict)
    validates: bool = False

    @property
    def at_end(self) -> bool:
        """True if all steps are made."""
        return self.total_steps is not None and self.step >= self.total_steps


@dataclass(slots=True)
class Recovery:
    """`at`: when a loss was seen (Unix seconds). `seconds`: until a step was made again. `redone`: seconds for which
    steps were repeated."""

    at: float
    seconds: float = 0.0
    redone: float = 0.0


class TimeLedger:
    """`began`, `now`: Unix seconds. A clock that goes back takes no time away: `began` moves with it."""

    def __init__(self, began: float, step: int = 0) -> None:
        self.began = self.until = began
        self.seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        self.mode: Mode = "starting"
        self.high = step
        """The highest step that was ever reached."""
        self.recoveries: list[Recovery] = []
        self._last: Seen | None = None
        self._begun = False
        """This launch has computed something."""
        self._forget()

    def _forget(self) -> None:
        self._trouble: int | None = None
        """While it recovers: the lowest step that was seen meanwhile."""
        self._pace = StepPace()
        self._owed: dict[Category, float] = {}
        """Waits that trainers have counted, and that no interval has so far."""
        self._waits_from: tuple[float, Seen] | None = None
        """The look since which waits are counted."""

    @property
    def wall(self) -> float:
        """Seconds of the run so far: the sum of all categories."""
        return self.until - self.began

    @property
    def pace(self) -> float:
        """Steps per second of training of late; 0 before the first."""
        return self._pace.per_second

    def left(self) -> float | None:
        """Returns the seconds until the last step at this pace; None while that is unknown."""
        seen = self._last
        if self.mode != "training" or seen is None or seen.total_steps is None or not self.pace:
            return None
        return max(0, seen.total_steps - seen.step) / self.pace

    def step(self, seen: Seen | None, now: float) -> Mode:
        """Takes in a look (None: nothing is known of the job so far), and returns the job's mode."""
        if self.mode == "over" and (seen is None or seen.over):
            return self.mode  # its time stands still
        passed = self._pass(now)
        if passed > GAP_SECONDS or self.mode == "over":
            self.seconds["idle"] += passed
            self._forget()
            self.mode = "starting"
        else:
            self._give(seen, passed)
        if seen is not None:
            self._last, self.high = seen, max(self.high, seen.step)
        return self.mode

    def carry(self, now: float) -> None:
        """Goes on with the ledger of an earlier launch: nothing ran in between."""
        self.seconds["idle"] += self._pass(now)
        self._forget()
        self._last, self._begun, self.mode = None, False, "starting"

    # -- what the time between two looks was --------------------------------------------------------------------

    def _pass(self, now: float) -> float:
        """Returns the seconds since the last look."""
        passed = now - self.until
        if passed < 0:
            self.began += passed
        self.until = now
        return max(0.0, passed)

    def _give(self, seen: Seen | None, passed: float) -> None:
        last, before = self._last, self.mode
        self.mode = self._mode_of(seen) if seen is not None else before
        steps = 0
        if seen is not None and last is not None and seen.generation == last.generation:
            steps = max(0, seen.step - last.step)
        if before == self.mode == "training":
            self._pace.train(passed, steps)
            self._count_waits(seen)
            self._work(passed, steps)
            return
        self._owed, self._waits_from = {}, None
        other = _category(self.mode if before == "training" else before)
        work = min(passed, steps / self.pace) if self.pace else 0.0
        self._work(work, steps)
        self.seconds[other] += passed - work
        if other == "recovering" and self.recoveries:
            self.recoveries[-1].seconds += passed - work

    def _mode_of(self, seen: Seen) -> Mode:
        self._look_for_trouble(seen)
        computed = any(split.get("computing", 0) > 0 for split in seen.trainers.values())
        self._begun = self._begun or computed or (self._last is not None and seen.step > self._last.step)
        if seen.over:
            return "over"
        if seen.waits:
            return "idle"
        if not self._begun:
            return "starting"
        if seen.at_end:
            return "checkpointing"  # the last one, and the model
        if self._trouble is not None:
            return "recovering"
        return "validating" if seen.validates else "training"

    def _look_for_trouble(self, seen: Seen) -> None:
        """Trouble begins with a loss, and ends with the first step after it."""
        last = self._last
        if last is None or not self._begun or seen.at_end or seen.over:
            return
        lost = bool(last.members - seen.members) or seen.generation > last.generation or not seen.whole
        if lost or seen.cut_off:
            if self._trouble is None:
                self.recoveries = [*self.recoveries, Recovery(self.until)][-RECOVERIES:]
            self._trouble = seen.step if self._trouble is None else min(self._trouble, seen.step)
        elif self._trouble is not None:
            self._trouble = None if seen.step > self._trouble else seen.step

    def _work(self, seconds: float, steps: int) -> None:
        """Gives time in which steps were made to them and to what they waited for."""
        for category, owed in self._owed.items():
            part = min(seconds, owed)
            self._owed[category] -= part
            self.seconds[category] += part
            seconds -= part
        redone = 0.0
        if self._last is not None and self._last.step < self.high:
            redone = seconds * min(1.0, (self.high - self._last.step) / max(1, steps))
        self.seconds["redone"] += redone
        self.seconds["productive"] += seconds - redone
        if redone and self.recoveries:
            self.recoveries[-1].redone += redone

    def _count_waits(self, seen: Seen | None) -> None:
        """Takes on what trainers and shards have counted, every few seconds."""
        if seen is None:
            return
        since, before = self._waits_from or (self.until, seen)
        if self.until - since >= WAITS_SECONDS:
            spent = [
                {at: max(0.0, split.get(at, 0.0) - before.trainers[t].get(at, 0.0)) for at in split}
                for t, split in seen.trainers.items()
                if t in before.trainers
            ]
            at_work = [split for split in spent if sum(split.values()) > 0]
            shards, data = ([split.get(at, 0.0) for split in at_work] for at in ("shards", "data"))
            copied = [seconds - before.checkpoints.get(shard, seconds) for shard, seconds in seen.checkpoints.items()]
            self._owe("checkpointing", max([0.0, *copied]))
            self._owe("data", sum(data) / max(1, len(data)))
            self._owe("straggler", sum(shards) / max(1, len(shards)) - min(shards, default=0.0))
            since, before = self.until, seen
        self._waits_from = since, before

    def _owe(self, category: Category, seconds: float) -> None:
        self._owed[category] = self._owed.get(category, 0.0) + seconds

    # -- how it is kept -----------------------------------------------------------------------------------------

    def export(self) -> dict[str, Any]:
        """Returns a value for JSON, for `load`."""
        return {
            "began": self.began,
            "until": self.until,
            "high": self.high,
            "mode": self.mode,
            "pace": self.pace,
            "left": self.left(),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "recoveries": [[r.at, round(r.seconds, 3), round(r.redone, 3)] for r in self.recoveries],
        }

    @staticmethod
    def load(kept: Mapping[str, Any]) -> TimeLedger:
        """Raises KeyError, TypeError or ValueError."""
        ledger = TimeLedger(float(kept["until"]), int(kept["high"]))
        for name in CATEGORIES:
            ledger.seconds[name] = max(0.0, float(kept["seconds"][name]))
        ledger.began = ledger.until - sum(ledger.seconds.values())
        ledger.mode = "over" if kept["mode"] == "over" else "starting"
        ledger.recoveries = [Recovery(*row) for row in kept["recoveries"]]
        return ledger


def goodput_of(kept: Mapping[str, Any]) -> float | None:
    """Returns the part of the run's time in which new steps were made, of `TimeLedger.export`; None for a short run."""
    wall = sum(kept["seconds"].values())
    return round(float(kept["seconds"]["productive"]) / wall, 4) if wall >= SHORT_SECONDS else None


def _category(mode: Mode) -> Category:
    """Returns the category of time in which no steps are made. A job that is over has made its last checkpoint."""
    return mode if mode in ("starting", "recovering", "validating", "idle") else "checkpointing"
