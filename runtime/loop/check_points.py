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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from graphft.data import DataSpec
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Program
from graphft.runtime.checkpoint.manifest import Manifest, is_directory
from graphft.runtime.checkpoint.metadata import MADE, made
from graphft.runtime.checkpoint.versioned_store import (
    MANIFEST,
    NO_MANIFEST,
    DamagedCheckpoint,
    DeletedCheckpoint,
    unavailable,
)
from graphft.runtime.fs import FS, file_system
from graphft.runtime.loop.ranks import RankStates
from graphft.runtime.loop.snapshot import STATUS, Found, Snapshot, found_in, load_found, take
from graphft.runtime.loop.targets import Stateful, targets_of
from graphft.runtime.loop.train_status import TrainStatus
from graphft.runtime.loop.version_store import Keep, LoopStore, as_keep, superseded
from graphft.transpiler.record import digest_of

log = logging.getLogger("graphft")

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
        data: DataSpec | None = None,
        storage_options: Mapping[str, Any] | None = None,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The arguments are those of `save_check_point`; `every_seconds` is for `offer`."""
        if not isinstance(every_seconds, (int, float)) or not every_seconds >= 0:
            raise UsageError(
                f"every_seconds is {every_seconds!r}, expected a number of seconds",
                rule="option",
                help="every_seconds=600",
            )
        self._data = {} if data is None else {"data": digest_of(data.fingerprint())}
        self.url = path = os.fspath(path)
        if not path:
            raise UsageError("the path of the checkpoints is empty", rule="path", help='a folder or URL: "checkpoints"')
        self.fs, self.path = (fs, path) if fs is not None else file_system(path, storage_options)
        self.keep, self._sleep = as_keep(keep), sleep
        self.store = LoopStore(self.fs, self.path, self.url)
        self._changed = threading.Condition()
        self._waiting: tuple[Snapshot, Saving] | None = None
        self._thread: threading.Thread | None = None
        self.every_seconds, self._clock, self._begun_at = every_seconds, clock, clock()
        self._writer, self._known = uuid.uuid4().hex[:12], -1
        """Tells this object's versions; the newest version when it loaded or saved last, -1 before that."""
        self._damaged: set[int] = set()
        """Versions that this object found damaged: none of those to keep."""
        self._values: dict[int, float | None] = {}
        """By version, the metric that `keep` looks at: read once."""

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        status: TrainStatus,
        *,
        main_program: Program | None = None,
        random_states: bool = True,
        ranks: RankStates | None = None,
    ) -> int:
        """Saves now; returns the version. `ranks`: what `gather_rank_states` returned.

        Raises StorageUnavailable after TRIES, GraphftError for what cannot be saved.
        """
        targets = targets_of(state, main_program)
        self.wait()
        self._begun_at = self._clock()
        snapshot, saving = take(targets, status, random_states, ranks, copy=False), Saving(status.step, self.url)
        self._write(snapshot, saving)
        version = saving.wait()
        assert version is not None
        return version

    def begin(
        self,
        state: Any,
        status: TrainStatus,
        *,
        main_program: Program | None = None,
        random_states: bool = True,
        ranks: RankStates | None = None,
    ) -> Saving:
        """Copies the state, and saves it beside what goes on. One save is at work; of those that wait, the newest."""
        snapshot = take(targets_of(state, main_program), status, random_states, ranks, copy=True)
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
        pause = FIRST_PAUSE
        while True:
            saving.tries += 1
            try:
                version = self._commit(snapshot)
                break
            except BaseException as error:
                if self._may_succeed(error, saving.tries):
                    log.warning("checkpoint in %s: %s; trying again in %.1f s", self.url, describe(error), pause)
                    self._sleep(pause)
                    pause = min(2 * pause, LAST_PAUSE)
                    continue
                log.error("the checkpoint %s was NOT saved: %s", saving.what, describe(error))
                if isinstance(error, OSError) and not isinstance(error, GraphftError):
                    error = unavailable(self.url, error)
                saving._end(error=error)
                return
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
        version = self._next_version()
        by = made(None, **{WRITER: self._writer, **snapshot.made_of, **self._data})
        self.store.write(version, {MADE: by, **snapshot.meta}, snapshot.tensors)
        self._values[version] = snapshot.status.metrics.get(self.keep.best)
        self._known = version
        return version

    def _next_version(self) -> int:
        """Raises Superseded if another object has saved here since this one loaded or saved: it goes on from there, or
        began anew; what this one saves would be taken for what comes after that."""
        newest = max(self.store.all_committed(), default=-1)
        if 0 <= self._known < newest:
            with contextlib.suppress(DamagedCheckpoint):
                by = self.store.manifest(newest).meta[MADE]
                if by.get(WRITER) != self._writer:  # else the answer to a save of its own was lost
                    raise superseded(
                        f"{self.url}: {by.get('host', 'another process')} has saved version {newest} meanwhile; the "
                        f"newest that this process knows is {self._known}"
                    )
        return self.store.next_version()

    # -- deleting ---------------------------------------------------------------------------------------------------

    def prune(self, told: Callable[[int], None] = lambda count: None) -> list[int]:
        """Deletes what is not to be kept, and what crashes left before the newest; returns these versions.

        The newest that is whole stays: it is read for that, and `told` gets the bytes. Raises DamagedCheckpoint if none
        is whole: nothing is deleted then.
        """
        damaged = []
        for version in self.store.all_committed():
            try:
                self.store.verify(self.store.manifest(version), told)
                return self._collect(version)
            except DeletedCheckpoint:
                return self.prune(told)
            except DamagedCheckpoint as error:
                log.error("%s", error.message)
                damaged.append(error)
        if damaged:
            raise self._none_whole(damaged)
        return []

    def _collect(self, good: int) -> list[int]:
        """`good`: a version that is whole."""
        values = [(v, self._value_of(v)) for v in self.store.all_committed() if v not in self._damaged]
        if self.keep.best and not any(value is not None for _, value in values):
            log.warning("keep best=%r: no checkpoint in %s has that metric; none is deleted", self.keep.best, self.url)
            return []
        return self.store.collect({*self.keep.of(values), good})

    def _value_of(self, version: int) -> float | None:
        if self.keep.best and version not in self._values:
            self._values[version] = None
            with contextlib.suppress(DamagedCheckpoint):
                status = TrainStatus.from_json(self.store.manifest(version).meta[STATUS])
                self._values[version] = status.metrics.get(self.keep.best)
        return self._values.get(version)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(
        self,
        state: Any,
        *,
        main_program: Program | None = None,
        version: int | None = None,
        random_states: bool = True,
        trainer_id: int = 0,
        per_rank: Mapping[str, Stateful] | None = None,
        partial: bool = False,
    ) -> TrainStatus | None:
        """See `load_check_point`."""
        targets, own = targets_of(state, main_program), (targets_of(per_rank) if per_rank else {})
        with self._asking():
            known = max(self.store.all_committed(), default=-1)
        found = self.newest(version)
        if found is None:
            return None
        if left := load_found(found, targets, own, trainer_id, random_states, partial):
            log.warning(
                "checkpoint %d of %s is loaded in part; not loaded: %s", found.version, self.url, "; ".join(left)
            )
        self._known = max(known, found.version)  # what comes after that is another process's
        return found.status

    def newest(self, version: int | None = None) -> Found | None:
        """Returns the newest checkpoint that is whole, or the one asked for; None if there is none at all.

        Damaged ones are named, and older ones looked at. Raises GraphftError[checkpoint] if all are damaged, or the one
        that was asked for is, or is not there; StorageUnavailable where the storage fails, which says nothing of them.
        """
        with self._asking():
            if version is None:
                return self._newest()
            if not self.store.committed(version):
                raise GraphftError(
                    f"{self.url} has no checkpoint {version}; it has {self.store.all_committed()}",
                    rule="checkpoint",
                    help="give one of those",
                )
            return self._read(self.store.manifest(version))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turns a storage's own errors into ours. Raises StorageUnavailable."""
        try:
            yield
        except GraphftError:
            raise
        except OSError as error:
            raise unavailable(self.url, error) from None  # else tens of frames of a library stand before it

    def _newest(self) -> Found | None:
        damaged: list[DamagedCheckpoint] = []
        there = self.store.all_committed()
        if lost := [v for v in self.store.without_manifest() if v > max(there, default=-1)]:
            log.warning("%s: newer than what counts is checkpoint %d, which %s", self.url, lost[0], NO_MANIFEST)
        for candidate in there:
            try:
                found = self._read(self.store.manifest(candidate))
            except DeletedCheckpoint:
                return self._newest()
            except DamagedCheckpoint as error:
                damaged.append(error)
                self._damaged.add(candidate)
                log.error("%s", error.message)
                continue
            if damaged:
                log.error("going back to checkpoint %d of %s, the newest that is whole", candidate, self.url)
            return found
        if damaged:
            raise self._none_whole(damaged)
        above, name = posixpath.split(self.path.rstrip("/"))
        if is_directory(name) and self.fs.size(posixpath.join(self.path, MANIFEST)) is not None:
            raise GraphftError(
                f"{self.url} is a version of a checkpoint, not the place where they are saved",
                rule="checkpoint",
                help=f"give {above}; and version={int(name.rpartition('-')[2])} for this one",
            )
        return None

    def _none_whole(self, damaged: list[DamagedCheckpoint]) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self.url}: none of its {len(damaged)} checkpoints is whole: "
            + "; ".join(error.message for error in damaged[:3]),
            rule="checkpoint",
            help="restore them from a copy; or delete that folder to begin anew",
        )

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
