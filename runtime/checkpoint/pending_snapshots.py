"""What a shard has still to write: a few snapshots, the newest among them, and at last the job's model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphft.runtime.checkpoint.manifest import Part
from graphft.runtime.checkpoint.metadata import VALIDATE
from graphft.runtime.coordination.records import Committed

if TYPE_CHECKING:
    from torch import Tensor

KEEP, KEEP_VALIDATED = 2, 8
"""Snapshots that may wait, beside the one that is being written, and others that are to be validated: each is as large
as the shard."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A shard's state at one step. Nothing in it changes any more. `meta`: the manifest's."""

    generation: int
    step: int
    values: Mapping[str, Tensor]
    ledger: str
    keep: int
    meta: Mapping[str, Any]

    @property
    def validated(self) -> bool:
        """True if the model is to be validated at this step."""
        return bool(self.meta.get(VALIDATE))


@dataclass(frozen=True, slots=True)
class Published:
    """A part that is written and recorded in etcd, of a checkpoint that was not committed then."""

    generation: int
    step: int
    part: Part
    keep: int
    meta: Mapping[str, Any]


Work = Snapshot | Committed | Published
"""A snapshot to be written; the final checkpoint, that the model is to be made of; a part to be recorded once more."""


def worth(snapshot: Snapshot) -> tuple[int, int]:
    """Returns a key: of two snapshots that wait, the one with the lower key is given up.

    The rule is a function of the step alone, and so the same on all shards: they give up the same checkpoints, and
    those that are left become whole, although each shard writes at a pace of its own.
    """
    return snapshot.generation, snapshot.step & -snapshot.step


class PendingSnapshots:
    """A queue between a shard's loop and the thread that writes. Bounded: a disk that is slow, or fails, must not fill
    the memory."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Snapshot] = []
        self._final: Committed | None = None
        self._again: Published | None = None
        self._closed = False

    def add(self, work: Work) -> list[Snapshot]:
        """Takes in work: a snapshot behind the older ones; returns those that were given up for it."""
        given_up = []
        with self._changed:
            if isinstance(work, Committed):
                self._final = work
            elif isinstance(work, Published):
                self._again = work
            else:
                self._waiting = sorted([*self._waiting, work], key=lambda s: (s.generation, s.step))
                newest = self._waiting[-1]
                for validated, most in ((False, KEEP), (True, KEEP_VALIDATED)):
                    while len(alike := [s for s in self._waiting if s.validated is validated]) > most:
                        least = min([s for s in alike if s is not newest], key=worth)
                        self._waiting.remove(least)
                        given_up.append(least)
            self._changed.notify_all()
        return given_up

    def take(self) -> Work | None:
        """Returns the oldest work there is, as soon as there is some; None: this queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._final or self._again)
            if self._closed:
                return None
            if self._waiting:
                return self._waiting.pop(0)
            if self._again is not None:
                again, self._again = self._again, None
                return again
            final, self._final = self._final, None
            return final

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def pause(self, seconds: float) -> bool:
        """Waits for that time; returns at once, and True, when this queue is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, seconds)
