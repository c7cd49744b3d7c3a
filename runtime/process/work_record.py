"""The present work of a trainer: a few numbers in a file that outlive it, however it ends; and where its time went.

Of a process that is killed the launcher reads here which batch it was reading or computing, and whether it left in
order. The file is mapped, so that a note costs no system call. A process that starts begins a new file."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Literal, NamedTuple

from graphft.runtime.process.identity import UNKNOWN, Identity, identify

_FORMAT = struct.Struct("<4sxxxxqqBxxxxxxx4qBxxxxxxx3q")
_MAGIC = b"gft1"
_PHASE, _PLACE, _AHEAD, _AHEAD_PLACE = 24, 32, 64, 72
"""Offsets in the file."""


Activity = Literal["computing", "data", "shards", "idle"]
"""computing: block step runs; data: it waits for a batch to be read; shards: it waits for parameters or answers of
pservers, and so for other trainers; idle: it has nothing to compute, loads, or does its start check."""


class Phase(IntEnum):
    """Phase of the main thread. In `IDLE` it runs none of the user's code: it waits, or has reported a failure."""

    IDLE = 0
    LOADING = 1
    READING = 2
    COMPUTING = 3
    LEFT = 4
    """The process gave back what it held, because it was asked to go."""
    PROVING = 5
    """The start check: it computes the batch that all trainers do first, and has claimed nothing."""
    REPORTED = 6
    """It runs none of the user's code: its batch failed, the queue counts that, and it ends with the error."""


_ACTIVITY: dict[int, Activity] = {Phase.READING: "data", Phase.COMPUTING: "computing"}
"""All other phases are idle."""
_WAITS: dict[int, Activity] = {Phase.READING: "data", Phase.COMPUTING: "shards"}
"""A wait in the middle of a batch that is read is one for storage; of one that is computed, for the shards."""


class Place(NamedTuple):
    """A batch of a chunk in a pass, as the chunk queue counts them (modes with local steps: a unit of batches)."""

    pass_index: int
    chunk: int
    batch: int


class Note(NamedTuple):
    """A process's last note. `claim`: the revision of its claim of the chunk, 0 if it has none. `ahead`: the batch
    that its other thread was reading ahead, if it was."""

    phase: Phase
    place: Place
    claim: int
    ahead: Place | None

    @property
    def places(self) -> frozenset[Place]:
        """Returns the batches of which user code was running: none, one or two."""
        at = {self.place} if self.phase in (Phase.READING, Phase.COMPUTING, Phase.PROVING) else set()
        return frozenset(at | ({self.ahead} if self.ahead is not None else set()))


class TimeSplit:
    """Seconds of the main thread by activity, since the process began. Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[Activity, float] = {"computing": 0.0, "data": 0.0, "shards": 0.0, "idle": 0.0}
        self._now: tuple[Activity, float] = ("idle", clock())

    def at(self, activity: Activity) -> None:
        (before, since), now = self._now, self._clock()
        self._seconds[before] += now - since
        self._now = (activity, now)

    def read(self) -> dict[str, float]:
        """Returns the seconds up to now. In the moment of a change the last piece may be missing: the next has it."""
        seconds = self._seconds.copy()
        activity, since = self._now
        seconds[activity] += max(0.0, self._clock() - since)
        return {name: round(value, 4) for name, value in seconds.items()}


def record_path(job_dir: Path, index: int) -> Path:
    """Returns the file of this machine's trainer of this index; a job's folder may be shared by machines."""
    return job_dir / "run" / f"trainer-{index}@{socket.gethostname()}"


def read_note(path: Path, process: Identity | None = None) -> Note | None:
    """Returns the note there, by `process` if one is given; None if there is none (any more)."""
    try:
        magic, pid, started, number, *numbers = _FORMAT.unpack(path.read_bytes())
        phase = Phase(number)
    except (OSError, struct.error, ValueError):
        return None
    known = process is None or (process != UNKNOWN and (process.pid, process.started) == (pid, started))
    if magic != _MAGIC or not known:
        return None
    place, claim, ahead = Place(*numbers[:3]), numbers[3], Place(*numbers[5:8])
    return Note(phase, place, claim, ahead if numbers[4] else None)


class WorkRecord:
    """Written by one process. `before`: the last note of the process before it. `split`: where its time went."""

    def __init__(self, path: Path) -> None:
        self.split = TimeSplit()
        self.before = read_note(path)
        self._file: mmap.mmap | bytearray = bytearray(_FORMAT.size)
        with contextlib.suppress(OSError, ValueError):  # a file system without it: nothing is known of a death then
            self._file = _mapped(path)
        me = identify()
        _FORMAT.pack_into(self._file, 0, _MAGIC, me.pid, me.started, Phase.IDLE, 0, 0, 0, 0, 0, 0, 0, 0)

    def end(self) -> None:
        """The batch is over. That it was reported stays noted."""
        if self.phase != Phase.REPORTED:
            self.mark(Phase.IDLE)

    def begin(self, phase: Phase, place: Place, claim: int = 0) -> None:
        """The main thread is at this batch. It is never half noted: the phase comes last."""
        self.mark(Phase.IDLE)
        struct.pack_into("<4q", self._file, _PLACE, *place, claim)
        self.mark(phase)

    @property
    def phase(self) -> Phase:
        return Phase(self._file[_PHASE])

    def mark(self, phase: Phase) -> Phase:
        """Notes another phase, and returns the one before."""
        before, self._file[_PHASE] = self.phase, phase
        self.split.at(_ACTIVITY.get(phase, "idle"))
        return before

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While the process waits for others: its death then tells nothing of its batch."""
        before = self.mark(Phase.IDLE)
        self.split.at(_WAITS.get(before, "idle"))
        try:
            yield
        finally:
            self.mark(before)

    def ahead(self, place: Place | None) -> None:
        """The other thread reads this batch ahead; None: it does not any more."""
        self._file[_AHEAD] = 0
        if place is not None:
            struct.pack_into("<3q", self._file, _AHEAD_PLACE, *place)
            self._file[_AHEAD] = 1


def _mapped(path: Path) -> mmap.mmap:
    """A file of its own: a process that still has the one before does not write into this one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(descriptor, bytes(_FORMAT.size))  # or the first note would find the disk full, and be a SIGBUS
        return mmap.mmap(descriptor, _FORMAT.size)
    finally:
        os.close(descriptor)
