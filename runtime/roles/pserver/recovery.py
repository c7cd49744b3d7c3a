"""Recovery of a shard: its generation, and the checkpoint that this begins at."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.commit import Commits, reaches
from graphft.runtime.checkpoint.manifest import MADE, SOURCE
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint, StorageUnavailable
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Committed, Generation
from graphft.runtime.etcd import TransientEtcdError
from graphft.runtime.roles.session import ProcessEnd

T = TypeVar("T")
STORAGE_SECONDS, MAX_STORAGE_SECONDS, REMIND_SECONDS = 0.5, 5.0, 60.0
"""Pauses between tries to read checkpoints, and between messages that say so."""
LATE_SECONDS = 2.0
"""A commit shows in the view after so long at most, or etcd itself is asked for it."""
LOAD_LIMITS = 10
"""Restoring a checkpoint may take so many times as long as anything else that the main thread does."""


class Recovery:
    """Used by the shard's main thread, but for `age`.

    `generation`: the shard's. `restarted`: this process is not the first of its index. `restore`: takes on the state
    that a generation began at, or raises DamagedCheckpoint or StorageUnavailable.
    """

    def __init__(
        self, member: Member, end: ProcessEnd, commits: Commits, job_dir: Path, restore: Callable[[Generation], None]
    ) -> None:
        self.member, self.end, self.commits, self.job_dir, self.restore = member, end, commits, job_dir, restore
        self.generation, self.restarted = Generation(), False
        self._aged: Committed | None = None
        self._since: float | None = None
        """The checkpoint that `age` was asked for last, and when it was written."""
        self._missed = math.inf
        """Since when the view lacks what this shard has committed; inf: it does not."""

    def age(self, committed: Committed | None) -> float:
        """Returns the seconds since the newest checkpoint was written; without any, since the job was made.

        On this process's clock, from the moment on when it first saw that checkpoint: a clock that is set back
        meanwhile changes nothing.
        """
        now = time.monotonic()
        if self._since is None or committed != self._aged:
            newer = self._aged is not None and committed is not None and committed.step > self._aged.step
            self._since = now - (0.0 if newer else self._age_when_seen(committed))
            self._aged = committed
        return now - self._since

    def _age_when_seen(self, committed: Committed | None) -> float:
        with contextlib.suppress(GraphftError, OSError, KeyError):
            if committed is None:
                at = (self.job_dir / "job.json").stat().st_mtime
            else:
                at = self.commits.store.read_manifest(committed.checkpoint).meta[MADE]["at"]
            return max(0.0, time.time() - at)
        return math.inf

    def _tell_of_start(self, found: Generation) -> None:
        """Tells of a run that etcd did not know, and that goes on from the disk."""
        manifest = self.commits.manifest_of(found)
        source = manifest.meta.get(MADE, {}).get(SOURCE) if manifest is not None else None
        if source is not None:
            self.member.events.log.info("the job begins at step %d, with checkpoint %s", found.step, source)
            return
        self.member.events.emit(
            "etcd-behind",
            "etcd knows nothing of this run: its data are lost or deleted (graphft clean), or it is another etcd; "
            f"the job goes on from step {found.step}, where the newest whole checkpoint is",
            step=found.step,
        )

    def join(self) -> None:
        """Joins the shard's generation: as it is on a first start; raising the generation on a restart."""
        self.when_storage_answers(self._join)
        if self.restarted:
            number, step = self.generation.number, self.generation.step
            text = f"pserver {self.member.index} is back; generation {number} goes on from step {step}"
            self.member.events.emit("restarted", text, step=step)

    def _join(self) -> None:
        """Joins; before, if etcd was restored from a backup: the job goes on from the disk."""
        if found := self.commits.ensure_generation():
            self._tell_of_start(found)
        behind = self.commits.catch_up()
        if behind is not None:
            self.member.events.emit(
                "etcd-behind",
                "etcd does not know of the newest checkpoint (all was ended before it was told, or it was restored "
                f"from a backup): generation {behind.number} begins at step {behind.step}, where the newest whole "
                "checkpoint is",
                step=behind.step,
            )
        self.generation, self.restarted = self.commits.begin()
        if self.restarted and behind is None:
            committed = self.commits.committed()
            self.generation = self.commits.rollback(f"pserver {self.member.index} was restarted")
            if committed is not None and self.generation.step < committed.step:
                self.member.events.emit(
                    "damaged-checkpoint",
                    f"the checkpoint of step {committed.step}, which was committed, is not in "
                    f"{self.commits.store.where()}, or is damaged: going back to step {self.generation.step}",
                    step=self.generation.step,
                )

    def when_storage_answers(self, call: Callable[[], T]) -> T:
        """`call()`, again while the checkpoints' storage cannot be used. It is safe to repeat.

        An unreadable checkpoint is no damaged one: it is no reason to go back to an older one.
        """
        told, pause, began = float("-inf"), STORAGE_SECONDS, time.monotonic()
        while True:
            try:
                return call()
            except StorageUnavailable as error:
                self.end.check_lease()
                if self.member.view.over:
                    raise
                if time.monotonic() - told > REMIND_SECONDS:
                    told = time.monotonic()
                    self.member.events.emit(
                        "storage-unavailable",
                        f"pserver {self.member.index} has waited for its checkpoints for "
                        f"{told - began:.0f} s: {error.message}. {error.help}",
                        shard=self.member.index,
                    )
            self.member.progress.beat()  # it waits, and says so
            time.sleep(pause)
            pause = min(2 * pause, MAX_STORAGE_SECONDS)

    def follow(self, newer: Generation, version: int) -> None:
        """Takes on a newer generation, which others may have raised."""
        self.member.events.log.info(
            "generation %d: back from version %d to step %d (%s)", newer.number, version, newer.step, newer.reason
        )
        self.generation = newer

    def load(self) -> None:
        """Takes on the state that the generation began at; goes further back if its file is damaged."""
        self.when_storage_answers(self._load)

    def _load(self) -> None:
        progress = self.member.progress
        while True:
            try:
                with progress.within(LOAD_LIMITS * progress.usual, "restoring a checkpoint"):
                    self.restore(self.generation)
                return
            except DamagedCheckpoint as error:
                damaged = self.generation.step
                self.generation = self.commits.rollback("damaged checkpoint", below=damaged)  # or it waits, which tells
                text = f"checkpoint of step {damaged} is damaged, going back further: {error.message}"
                self.member.events.emit("damaged-checkpoint", text)

    def overtake(
        self, mine: int, committed: Committed | None, seen: Generation | None, known: Committed | None
    ) -> None:
        """Goes on when etcd was restored from a backup meanwhile, and knows less than this process: `mine`, the number
        of its generation, and the newest checkpoint that it has `committed`, against those of the view.

        A view that is behind looks the same, so etcd itself is asked; for a commit only when it is late.
        """
        if seen is None or seen.number > mine:
            return
        if seen.number == mine and reaches(known, committed):
            self._missed = math.inf
            return
        if seen.number == mine and not self._is_late():
            return
        with contextlib.suppress(TransientEtcdError):
            raised = self.when_storage_answers(lambda: self.commits.overtake(mine, committed))
            if raised is not None:
                text = f"etcd was restored from a backup: generation {raised.number} begins at step {raised.step}"
                self.member.events.emit("etcd-behind", text, step=raised.step)

    def _is_late(self) -> bool:
        """True when a commit has been missing for LATE_SECONDS, once in that time."""
        now = time.monotonic()
        self._missed = min(self._missed, now)
        if now - self._missed < LATE_SECONDS:
            return False
        self._missed = now
        return True
