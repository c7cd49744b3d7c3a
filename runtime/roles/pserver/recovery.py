"""Where a shard goes on: its generation, and the checkpoint that this begins at."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from graphft.runtime.checkpoint.commit import Commits
from graphft.runtime.checkpoint.store import MANIFEST, Ages, DamagedCheckpoint, StorageUnavailable
from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import Committed, Generation
from graphft.runtime.roles.process_end import ProcessEnd

T = TypeVar("T")
STORAGE_SECONDS, MAX_STORAGE_SECONDS, REMIND_SECONDS = 0.5, 5.0, 60.0
"""Pauses between tries to read checkpoints, and between messages that say so."""
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
        self._ages = Ages()

    def age(self, committed: Committed | None) -> float:
        """Seconds since the newest checkpoint was written; without any, since the job was made."""
        root = self.commits.store.root
        return self._ages.of(
            root / committed.checkpoint / MANIFEST if committed is not None else self.job_dir / "job.json"
        )

    def join(self) -> None:
        """Joins the shard's generation: as it is on a first start; raising the generation on a restart.

        And before, if etcd was restored from a backup: the job goes on from what the disk holds.
        """
        self.commits.ensure_generation()
        behind = self.commits.catch_up()
        if behind is not None:
            self.member.events.emit(
                "etcd-behind",
                f"etcd does not know of the newest checkpoint (all was ended before it was "
                "told, or it was restored from a backup): "
                f"generation {behind.number} begins at step {behind.step}, where the newest whole "
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
                    f"{self.commits.store.root}, or is damaged: going back to step {self.generation.step}",
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
                self.member.events.emit(
                    "damaged-checkpoint",
                    f"checkpoint of step {self.generation.step} is damaged, going back further: {error.message}",
                )
                self.generation = self.commits.rollback("damaged checkpoint", below=self.generation.step)

    def overtake(self, mine: int, watched: Generation | None) -> None:
        """Etcd is older than this process, which lives on: it was restored meanwhile. A view that is behind looks the
        same, so etcd itself is asked. `mine`: the number of the generation that the shard is in."""
        if watched is not None and watched.number < mine:
            raised = self.when_storage_answers(lambda: self.commits.overtake(mine))
            if raised is not None:
                self.member.events.emit(
                    "etcd-behind",
                    f"etcd was restored from a backup while the job runs: generation "
                    f"{raised.number} begins at step {raised.step}",
                    step=raised.step,
                )
