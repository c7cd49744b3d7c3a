"""Checkpoints of a training loop: saved in the foreground or beside it, and found again."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from graphft.errors import GraphftError, describe
from graphft.ir import Program
from graphft.runtime.checkpoint.manifest import MADE, Manifest, directory_key, is_directory, made
from graphft.runtime.checkpoint.versioned_store import (
    MANIFEST,
    NO_MANIFEST,
    DamagedCheckpoint,
    DeletedCheckpoint,
    unavailable,
)
from graphft.runtime.fs import FS, file_system
from graphft.runtime.loop.loop_store import Keep, LoopStore, superseded
from graphft.runtime.loop.ranks import PerRank
from graphft.runtime.loop.snapshot import (
    OPTIMIZERS,
    PARAMETERS,
    STATUS,
    Found,
    Snapshot,
    TrainStatus,
    found_in,
    load_all,
    set_random_states,
    stateful_objects,
    take,
)

log = logging.getLogger("graphft")
T = TypeVar("T")

TRIES, FIRST_PAUSE, LAST_PAUSE = 8, 0.5, 30.0
"""A save that the storage refuses is tried again so often, with pauses (seconds) that double."""
HOPELESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
"""Errors of a storage that are no other when it is tried again."""
WRITER = "writer"
"""In a manifest's `made`: which object saved the version."""


class WaitedTooLong(GraphftError, TimeoutError):
    """A checkpoint was not committed in time."""


class Saving:
    """A checkpoint that is being saved. `version`: None until it is committed."""

    def __init__(self, step: int, url: str) -> None:
        self.what, self.tries = f"of step {step} to {url}", 0
        self.version: int | None = None
        self.superseded = False
        """True if a newer one was to be saved before this one had its turn: it is not saved then."""
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns its version when it is committed; None if a newer one took its place. Raises what it ended with;
        WaitedTooLong, a TimeoutError, when it takes longer than `timeout` seconds."""
        if not self._done.wait(timeout):
            state = f"try {self.tries} of {TRIES} is under way" if self.tries else "its turn has not come"
            raise WaitedTooLong(
                f"the checkpoint {self.what} was not saved within {timeout:g} s: {state}",
                rule="checkpoint-timeout",
                help="it goes on being saved: wait() again, or look at .done; warnings tell what the storage says",
            )
        if self._error is not None:
            raise self._error
        return self.version

    def _end(self, version: int | None = None, error: BaseException | None = None) -> None:
        self.version, self._error = version, error
        self._done.set()


class CheckPoints:
    """The checkpoints of a training loop in one place; what `save_check_point` and `load_check_point` are made of.

        checkpoints = graphft.CheckPoints("s3://bucket/run", keep=3)
        saving = checkpoints.begin(state, graphft.TrainStatus(epoch))      # goes on beside the loop

    `save`, `begin` and `offer` are for one thread of one process: that of trainer 0. A program that ends waits for what
    it has begun to save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fs: FS | None = None,
        *,
        keep: int | Keep = 3,
        every_seconds: float = 600.0,
        storage_options: Mapping[str, Any] | None = None,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The arguments are those of `save_check_point`; `every_seconds` is for `offer`."""
        self.url = path = os.fspath(path)
        self.fs, self.path = (fs, path) if fs is not None else file_system(path, storage_options)
        self.keep, self._sleep = Keep(newest=keep) if isinstance(keep, int) else keep, sleep
        self.store = LoopStore(self.fs, self.path, self.url)
        self._changed = threading.Condition()
        self._waiting: tuple[Snapshot, Saving] | None = None
        self._thread: threading.Thread | None = None
        self.every_seconds, self._clock, self._begun_at = every_seconds, clock, clock()
        self._writer, self._known = uuid.uuid4().hex[:12], -1
        """Tells this object's versions; the newest version when it loaded or saved last, -1 before that."""

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self, state: Any, status: TrainStatus, *, main_program: Program | None = None, random_states: bool = True
    ) -> int:
        """Saves now; returns the version. Raises StorageUnavailable after TRIES, GraphftError for what cannot be
        saved."""
        targets = stateful_objects(state, main_program)
        self.wait()
        self._begun_at = self._clock()
        saving = Saving(status.step, self.url)
        self._write(take(targets, status, random_states, copy=False), saving)
        version = saving.wait()
        assert version is not None
        return version

    def begin(
        self, state: Any, status: TrainStatus, *, main_program: Program | None = None, random_states: bool = True
    ) -> Saving:
        """Copies the state, and saves it beside what goes on. One save is at work; of those that wait, the newest."""
        snapshot = take(stateful_objects(state, main_program), status, random_states, copy=True)
        saving, self._begun_at = Saving(status.step, self.url), self._clock()
        with self._changed:
            if self._waiting is not None:
                self._waiting[1].superseded = True
                self._waiting[1]._end()
            self._waiting = snapshot, saving
            if self._thread is None:
                # No daemon: a program that ends waits for what it has begun to save.
                self._thread = threading.Thread(target=self._run, name=f"checkpoints {self.url}")
                self._thread.start()
        return saving

    def offer(
        self, state: Any, status: TrainStatus, *, main_program: Program | None = None, random_states: bool = True
    ) -> Saving | None:
        """For the end of each step: as `begin`, when `every_seconds` have passed since the save before began (or since
        this object was made), however short the epochs are; else None, at no cost."""
        if self._clock() - self._begun_at < self.every_seconds:
            return None
        return self.begin(state, status, main_program=main_program, random_states=random_states)

    def wait(self) -> None:
        """Returns when nothing is being saved."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                (snapshot, saving), self._waiting = self._waiting, None
            self._write(snapshot, saving)
            del snapshot

    def _write(self, snapshot: Snapshot, saving: Saving) -> None:
        pause, version = FIRST_PAUSE, None
        while version is None:
            saving.tries += 1
            try:
                version = self._commit(snapshot)
            except BaseException as error:
                if not self._may_succeed(error, saving.tries):
                    log.error("the checkpoint %s was NOT saved: %s", saving.what, describe(error))
                    if isinstance(error, OSError) and not isinstance(error, GraphftError):
                        error = unavailable(self.url, error)
                    saving._end(error=error)
                    return
                log.warning("checkpoint in %s: %s; trying again in %.1f s", self.url, describe(error), pause)
                self._sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
        saving._end(version)
        try:
            self._collect(version)
        except Exception as error:  # what cannot be deleted now goes with a later save
            log.warning("old checkpoints in %s stay for now: %s", self.url, describe(error))

    def _may_succeed(self, error: BaseException, tries: int) -> bool:
        """True if the save is to be tried again. A first save is not, where nothing is there to save in: a bucket."""
        hopeless = self._known < 0 and isinstance(error, FileNotFoundError)
        return isinstance(error, OSError) and error.errno not in HOPELESS and not hopeless and tries < TRIES

    def _commit(self, snapshot: Snapshot) -> int:
        """Raises GraphftError[superseded] if another object has saved here since this one loaded or saved: it goes on
        from there, or began anew; what this one saves would be taken for what comes after that."""
        newest = max(self.store.all_committed(), default=-1)
        if 0 <= self._known < newest:
            with contextlib.suppress(DamagedCheckpoint):
                by = self.store.manifest(newest).meta[MADE]
                if by.get(WRITER) != self._writer:  # else the answer to a save of its own was lost
                    raise superseded(
                        f"{self.url}: {by.get('host', 'another process')} has saved version {newest} meanwhile; the "
                        f"newest that this process knows is {self._known}"
                    )
        version = max(self.store.versions(), default=-1) + 1
        self.store.write(version, {MADE: made(**{WRITER: self._writer}), **snapshot.meta}, snapshot.tensors)
        self._known = version
        return version

    # -- deleting ---------------------------------------------------------------------------------------------------

    def prune(self) -> list[int]:
        """Deletes what is not to be kept, and what crashes left before the newest; returns these versions.

        The newest that is whole stays: it is read for that. Raises DamagedCheckpoint if none is whole: nothing is
        deleted then.
        """
        good = self._first_whole(self.store.verify)
        return self._collect(good[0]) if good is not None else []

    def _collect(self, good: int) -> list[int]:
        """`good`: a version that is whole."""
        values = [(v, self._value_of(v)) for v in self.store.all_committed()]
        if self.keep.best and not any(value is not None for _, value in values):
            log.warning("keep best=%r: no checkpoint in %s has that metric; none is deleted", self.keep.best, self.url)
            return []
        return self.store.collect({*self.keep.of(values), good})

    def _value_of(self, version: int) -> float | None:
        if self.keep.best:
            with contextlib.suppress(DamagedCheckpoint):
                status = TrainStatus.from_json(self.store.manifest(version).meta[STATUS])
                return status.metrics.get(self.keep.best)
        return None

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(
        self,
        state: Any,
        *,
        main_program: Program | None = None,
        version: int | None = None,
        random_states: bool = True,
        trainer_id: int = 0,
    ) -> TrainStatus | None:
        """See `load_check_point`."""
        targets = stateful_objects(state, main_program)
        known = max(self.store.all_committed(), default=-1)
        found = self.newest(version)
        if found is None:
            return None
        meta = found.manifest.meta
        load_all(targets, found.states, meta.get(OPTIMIZERS, {}), meta.get(PARAMETERS, {}))
        of_ranks = any(isinstance(target, PerRank) for target in targets.values())
        if random_states and found.random is not None and trainer_id == 0 and not of_ranks:
            set_random_states(found.random)
        self._known = max(known, found.version)  # what comes after that is another process's
        return found.status

    def newest(self, version: int | None = None) -> Found | None:
        """Returns the newest checkpoint that is whole, or the one asked for; None if there is none at all.

        Damaged ones are named, and older ones looked at. Raises GraphftError[checkpoint] if all are damaged, or the one
        that was asked for is, or is not there; StorageUnavailable where the storage fails, which says nothing of them.
        """
        if version is not None:
            if not self.store.committed(version):
                raise GraphftError(
                    f"{self.url} has no checkpoint {version}; it has {self.store.all_committed()}",
                    rule="checkpoint",
                    help="give one of those",
                )
            return self._read(self.store.manifest(version))
        newest = max(self.store.all_committed(), default=-1)
        for directory in self.store.unfinished():
            if directory_key(directory)[0] > newest:
                log.warning("%s: newer than what counts is %s, which %s", self.url, directory, NO_MANIFEST)
        if (found := self._first_whole(self._read)) is not None:
            return found[1]
        above, name = posixpath.split(self.path.rstrip("/"))
        if is_directory(name) and self.fs.size(posixpath.join(self.path, MANIFEST)) is not None:
            raise GraphftError(
                f"{self.url} is a version of a checkpoint, not the place where they are saved",
                rule="checkpoint",
                help=f"give {above}; and version={int(name.rpartition('-')[2])} for this one",
            )
        return None

    def _first_whole(self, read: Callable[[Manifest], T]) -> tuple[int, T] | None:
        """Returns the newest version that can be read, and what was; None if there is none at all."""
        damaged: list[str] = []
        for version in self.store.all_committed():
            try:
                found = read(self.store.manifest(version))
            except DeletedCheckpoint:  # by the process that saves here: there is a newer one by now
                return self._first_whole(read)
            except DamagedCheckpoint as error:
                damaged.append(error.message)
                log.error("%s", error.message)
                continue
            if damaged:
                log.error("going back to checkpoint %d of %s, the newest that is whole", version, self.url)
            return version, found
        if damaged:
            raise DamagedCheckpoint(
                f"{self.url}: none of its {len(damaged)} checkpoints is whole: {'; '.join(damaged[:3])}",
                rule="checkpoint",
                help="restore them from a copy; or delete that folder to begin anew",
            )
        return None

    def _read(self, manifest: Manifest) -> Found:
        tensors, _ = self.store.read_part(manifest, 0)
        try:
            return found_in(manifest, tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(
                f"checkpoint {manifest.step} of {self.url} does not say what its tensors are: {error!r}",
                rule="checkpoint",
                help="was it written by another version of graphft? its manifest names that under `made`",
            ) from error
