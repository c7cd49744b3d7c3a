"""A launcher's account of where its job's time goes: kept in the folder, and gone on with by the next one.

`time.json` is sealed JSON: {run, ledger}. It is written each few seconds, so a launcher that is killed loses those;
they count as idle then. Nothing here may hurt the job: what cannot be written is written later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphft.disk.sealed_json import seal, unseal
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.protocol.time_ledger import GAP_SECONDS, Seen, TimeLedger

log = logging.getLogger("graphft")

FILE = "time.json"
WRITE_SECONDS = 5.0


def seen_of(status: JobStatus) -> Seen:
    """Returns what the ledger needs of a look at the job."""
    members = [*status.pservers.values(), *status.trainers.values()]
    paused = bool(status.trainers) and all(trainer.get("paused") for trainer in status.trainers.values())
    validating = paused and any(trainer.get("validating") for trainer in status.trainers.values())
    return Seen(
        status.step,
        status.total_steps,
        status.generation,
        frozenset(str(member["id"]) for member in members),
        len(status.pservers) >= int(status.spec["pservers"]),
        (paused and not validating) or (bool(status.without_room) and not status.trainers),
        any(trainer.get("unreached") for trainer in status.trainers.values()),
        status.state != "running",
        {name: trainer.get("seconds", {}) for name, trainer in status.trainers.items()},
        {str(shard["id"]): shard.get("checkpoint_seconds", 0.0) for shard in status.pservers.values()},
        validating,
    )


def read_time(job_dir: Path, run: str) -> Mapping[str, Any] | None:
    """Returns what was kept of this run in its folder: `TimeLedger.export`. None if nothing was, or it is damaged."""
    try:
        kept: Mapping[str, Any] = unseal((job_dir / FILE).read_bytes())
        if kept["run"] == run:
            TimeLedger.load(kept["ledger"])
            return kept["ledger"]
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning("what is kept of where the run's time went cannot be used: %s", error)
    return None


class OwnAccount:
    """Keeps where the time of a job went whose launcher does not, since its observer began, or looked again after a
    while."""

    def __init__(self) -> None:
        self._ledger: TimeLedger | None = None

    def look(self, seen: Seen | None) -> Mapping[str, Any] | None:
        """Takes in a look; None: the job does not run. Returns `TimeLedger.export`, None before the first look."""
        now = time.time()
        if seen is not None:
            if self._ledger is None or not 0 <= now - self._ledger.until < GAP_SECONDS:
                self._ledger = TimeLedger(now, seen.step)
            self._ledger.step(seen, now)
        return self._ledger.export() if self._ledger is not None else None


class TimeKeeper:
    """Keeps the time of a launch that began at `since` (Unix seconds, as `clock` tells), where the run goes on at
    `step`. Used by the launcher's own thread, but for `export`."""

    def __init__(
        self, job_dir: Path, run: str, since: float, step: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._job_dir, self._run, self._clock = job_dir, run, clock
        self._lock = threading.Lock()
        self._next = 0.0
        if (kept := read_time(job_dir, run)) is None:
            self._ledger = TimeLedger(since, step)
        else:
            self._ledger = TimeLedger.load(kept)
            self._ledger.carry(since)

    def look(self, status: JobStatus) -> None:
        """Takes in a look at the job."""
        with self._lock:
            self._ledger.step(seen_of(status), self._clock())
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + WRITE_SECONDS
            self.write()

    def left(self) -> float | None:
        """As `TimeLedger.left`."""
        with self._lock:
            return self._ledger.left()

    def export(self) -> Mapping[str, Any]:
        with self._lock:
            return self._ledger.export()

    def write(self) -> None:
        """Writes the account now, as at the end of a launch. Raises nothing."""
        data = seal({"run": self._run, "ledger": self.export()})
        scratch = self._job_dir / f".{FILE}.{os.getpid()}"
        with contextlib.suppress(OSError):
            scratch.write_bytes(data)  # not fsynced: a disk that is busy is not to keep the launcher from its processes
            scratch.replace(self._job_dir / FILE)
