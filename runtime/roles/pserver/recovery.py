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
    """Used by the shard's main thread, but for `age`. `generation`: the shard's. `restarted`: this process is not the
    first of its index. `restore`: takes on the state that a generation began at, or raises DamagedCheckpoint or
    StorageUnavailable."""

    def __init__(
        self, member: Member, end: ProcessEnd, commits: Commits, job_dir: Path, restore: Callable[[Generation], None]
    ) -> None:
        self.member, self.end, self.commits, self.job_dir, self.restore = member, end, commits, job_dir, restore
        self.generation, self.restarted = Generation(), False
        self._written: tuple[Committed | None, float] | None = None
        """The checkpoint that `age` was asked for last, and when it was written."""
        self._missed = math.inf
        """Since when the view lacks what this shard has committed; inf: it does not."""

    def age(self, committed: Committed | None) -> float:
        """Returns the seconds since the newest checkpoint was written; without any, since the job was made."""
        if self._written is None or self._written[0] != committed:
            self._written = committed, self._written_at(committed)
        return max(0.0, time.time() - self._written[1])

    def _written_at(self, committed: Committed | None) -> float:
        with contextlib.suppress(GraphftError, OSError, KeyError):
            if committed is None:
                return (self.job_dir / "job.json").stat().st_mtime
            return float(self.commits.store.read_manifest(committed.checkpoint).meta[MADE]["at"])
        return -math.inf

    def _tell_of_start(self, found: Generation) -> None:
        """Tells of a run that etcd did not know, and that goes on from the disk."""
        manifest = self.commits.manifest_of(found)
        source = manifest.meta.get(MADE, {}).get(SOURCE) if manifest is not None else None
        if source is not None:
            self.member.events.log.info("the job begins at step %d, with checkpoint %s", found.step, source)
            return
        self._tell_behind("etcd knows nothing of this run: it is another etcd, or its data are lost", found)

    def _tell_behind(self, why: str, now: Generation) -> None:
        text = f"{why}: generation {now.number} goes on from step {now.step}, where the newest whole checkpoint is"
        self.member.events.emit("etcd-behind", text, step=now.step)

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
            self._tell_behind("etcd does not know of the newest checkpoint", behind)
        self.generation, self.restarted = self.commits.begin()
        if self.restarted and behind is None:
            committed = self.commits.committed()
            self.generation = self.commits.rollback(f"pserver {self.member.index} was restarted")
            if committed is not None and self.generation.step < committed.step:
                where, step = self.commits.store.where(), self.generation.step
                text = f"the checkpoint of step {committed.step}, which was committed, is not in {where}, or is damaged"
                self.member.events.emit("damaged-checkpoint", f"{text}: going back to step {step}", step=step)

    def when_storage_answers(self, call: Callable[[], T]) -> T:
        """`call()`, again while the checkpoints' storage cannot be used. It is safe to repeat. An unreadable checkpoint
        is no damaged one: it is no reason to go back to an older one."""
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
                    me, text = self.member.index, f"for {told - began:.0f} s: {error.message}. {error.help}"
                    text = f"pserver {me} has waited for its checkpoints {text}"
                    self.member.events.emit("storage-unavailable", text, shard=me)
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
        of its generation, and the newest checkpoint that it has `committed`, against those of the view. A view that is
        behind looks the same, so etcd itself is asked; for a commit only when it is late."""
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
                self._tell_behind("etcd was restored from a backup", raised)

    def _is_late(self) -> bool:
        """True when a commit has been missing for LATE_SECONDS, once in that time."""
        now = time.monotonic()
        self._missed = min(self._missed, now)
        if now - self._missed < LATE_SECONDS:
            return False
        self._missed = now
        return True
