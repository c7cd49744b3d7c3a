"""What a shard has still to write: a few snapshots, the newest among them, and at last the job's model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphft.runtime.checkpoint.manifest import VALIDATE, Part
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
        """Whether the model is to be validated at this step."""
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
    """Of two snapshots that wait, the one that is worth less is given up.

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

    def add(self, snapshot: Snapshot) -> list[Snapshot]:
        """Puts a snapshot behind the others; returns those that were given up for it."""
        with self._changed:
            self._waiting.append(snapshot)
            self._changed.notify_all()
            return self._thin_out()

    def restore(self, work: Work) -> list[Snapshot]:
        """What was taken could not be written now. Returns what was given up."""
        with self._changed:
            if isinstance(work, Committed):
                self._final = work
                return []
            if isinstance(work, Published):  # it is asked for again, if that is still of use
                return []
            self._waiting.insert(0, work)
            return self._thin_out()

    def finish(self, committed: Committed) -> None:
        """The job's model is to be made of this checkpoint, behind all snapshots."""
        with self._changed:
            self._final = committed
            self._changed.notify_all()

    def publish_again(self, published: Published) -> None:
        """The record of this part is to be written once more, when nothing else is to be done."""
        with self._changed:
            self._again = published
            self._changed.notify_all()

    def take(self) -> Work | None:
        """The oldest work there is, as soon as there is some; None: this queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._final or self._again)
            if self._closed:
                return None
            if self._waiting:
                return self._waiting.pop(0)
            again, self._again = self._again, None
            if again is not None:
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

    def _thin_out(self) -> list[Snapshot]:
        given_up = []
        for validated, most in ((False, KEEP), (True, KEEP_VALIDATED)):
            while len(alike := [s for s in self._waiting if s.validated is validated]) > most:
                least = min([s for s in alike if s is not self._waiting[-1]], key=worth)  # never the newest of all
                self._waiting.remove(least)
                given_up.append(least)
        return given_up
