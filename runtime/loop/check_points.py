"""Checkpoints of a training loop: saved in the foreground or beside it, and found again."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import graphft
from graphft.data import DataSpec
from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Program
from graphft.runtime.checkpoint.store import NO_MANIFEST
from graphft.runtime.fs import FS, file_system
from graphft.runtime.loop.answering import Unanswered, answered
from graphft.runtime.loop.failed_saves import HOPELESS, Untold, WaitedTooLong, asking, storage_failed
from graphft.runtime.loop.ranks import RankStates
from graphft.runtime.loop.retention import Keep, as_keep
from graphft.runtime.loop.snapshot import Found, Snapshot, found_in, load_found, take
from graphft.runtime.loop.targets import Stateful, targets_of
from graphft.runtime.loop.train_status import TrainStatus
from graphft.runtime.loop.version_store import DamagedVersion, DeletedVersion, Superseded, VersionManifest, VersionStore
from graphft.transpiler.fingerprint import digest_of

log = logging.getLogger("graphft")

TRIES, FIRST_PAUSE, LAST_PAUSE = 8, 0.5, 30.0
"""A save that the storage refuses is tried again so often, with pauses (seconds) that double."""
UNANSWERED_TRIES = 3
"""... and one to a storage that does not answer, each time for half a minute."""


class Saving:
    """A checkpoint that is being saved. `version`: None until it is committed."""

    def __init__(self, what: str = "") -> None:
        self.what = what
        """Of which step, and where to, in words."""
        self.version: int | None = None
        self.superseded = False
        """Whether a newer one was to be saved before this one had its turn: it is not saved then."""
        self.tries = 0
        self.told = False
        """Whether `wait` has raised what it ended with."""
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
                f"the checkpoint{self.what} was not saved within {timeout:g} s: {state}",
                rule="checkpoint-timeout",
                help="it goes on being saved: wait() again, or look at .done; warnings tell what the storage says",
            )
        if self._error is not None:
            self.told = True
            raise self._error
        return self.version

    def _end(self, version: int | None = None, error: BaseException | None = None) -> None:
        self.version, self._error = version, error
        self._done.set()


class AtRisk(NamedTuple):
    """What would be lost if the machine died now: since the newest state that is saved was taken."""

    seconds: float
    steps: int


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
        self.store = VersionStore(self.fs, self.path)
        self._untold = Untold(path)
        self._changed = threading.Condition()
        self._waiting: tuple[Snapshot, Saving, float] | None = None
        self._thread: threading.Thread | None = None
        self.every_seconds, self._clock = every_seconds, clock
        self._begun_at = clock()
        self._saved: tuple[float, int] = (self._begun_at, 0)
        """When the newest state that is saved was taken, and its step."""
        self._looked = False
        """Whether this object has saved, loaded, or looked for what is saved."""
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

        Raises StorageFailed after TRIES, GraphftError for what cannot be saved.
        """
        targets = targets_of(state, main_program)
        self.wait()
        self._begun_at = self._clock()
        snapshot, saving = take(targets, status, random_states, ranks, copy=False), self._saving(status)
        self._write(snapshot, saving, self._begun_at)
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
        saving = self._saving(status)
        self._begun_at = self._clock()
        with self._changed:
            if self._waiting is not None:
                self._waiting[1].superseded = True
                self._waiting[1]._end()
            self._waiting = snapshot, saving, self._begun_at
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

    def at_risk(self, status: TrainStatus) -> AtRisk:
        """What would be lost if the machine died now, at `status`. Once it looks for what an earlier process saved."""
        if not self._looked:
            self._look()
        taken, step = self._saved
        return AtRisk(self._clock() - taken, status.step - step)

    def _look(self) -> None:
        manifest = self._newest_manifest()
        if manifest is not None:
            age = max(0.0, time.time() - manifest.made.get("at", 0.0))
            self._saved = self._clock() - age, TrainStatus.from_json(manifest.status).step
        self._looked = True

    def wait(self) -> None:
        """Until nothing is being saved."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _saving(self, status: TrainStatus) -> Saving:
        return Saving(f" of step {status.step} to {self.url}")

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._waiting is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                (snapshot, saving, taken), self._waiting = self._waiting, None
            try:
                self._write(snapshot, saving, taken)
            except BaseException as error:  # what was not thought of ends this save, and not all that come
                self._end_failed(saving, error)
                log.error("the checkpoint could not be saved in %s: %s", self.url, describe(error))
            del snapshot

    def _write(self, snapshot: Snapshot, saving: Saving, taken: float) -> None:
        pause = FIRST_PAUSE
        while True:
            saving.tries += 1
            try:
                version = self._commit(snapshot)
            except (OSError, TimeoutError) as error:
                left = (
                    f"what is saved is {self._clock() - self._saved[0]:.0f} s old"
                    if self._looked
                    else "nothing is saved by this process"
                )
                most = UNANSWERED_TRIES if isinstance(error, Unanswered) else TRIES
                if saving.tries >= most or self._is_hopeless(error):
                    self._end_failed(saving, storage_failed(self.url, error))
                    log.error(
                        "the checkpoint of step %d could not be saved in %s: %s; %s",
                        snapshot.status.step,
                        self.url,
                        describe(error),
                        left,
                    )
                    return
                log.warning("checkpoint in %s: %s; trying again in %.1f s; %s", self.url, describe(error), pause, left)
                self._sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
            except BaseException as error:
                self._end_failed(saving, error)
                log.error("the checkpoint could not be saved in %s: %s", self.url, describe(error))
                return
            else:
                self._saved, self._looked = (taken, snapshot.status.step), True
                self._untold.saved()
                saving._end(version)
                self._try_to_prune(version)
                return

    def _end_failed(self, saving: Saving, error: BaseException) -> None:
        self._untold.failed(saving, self._known, error)
        saving._end(error=error)

    def _is_hopeless(self, error: BaseException) -> bool:
        """Trying again does not help; of a first save, neither where nothing is there to save in: a bucket, a mount."""
        first = not self._looked and isinstance(error, FileNotFoundError)
        return first or (isinstance(error, OSError) and error.errno in HOPELESS)

    def _newest_manifest(self) -> VersionManifest | None:
        """Raises DamagedVersion."""
        while newest := self.store.all_committed()[:1]:
            with contextlib.suppress(DeletedVersion):
                return self.store.manifest(newest[0])
        return None

    def _commit(self, snapshot: Snapshot) -> int:
        version = answered(self._next_version, self.url)
        made = {
            "at": time.time(),
            "host": socket.gethostname(),
            "writer": self._writer,
            "graphft": graphft.__version__,
            "torch": str(torch.__version__),
            **snapshot.made_of,
            **self._data,
        }
        manifest = self.store.write(version, made, snapshot.status.to_json(), snapshot.state, snapshot.tensors)
        self._values[manifest.version] = snapshot.status.metrics.get(self.keep.best)
        self._known = manifest.version
        return manifest.version

    def _next_version(self) -> int:
        self._check_alone()
        return self.store.next_version()

    def _check_alone(self) -> None:
        """Raises Superseded if another object has saved here since this one loaded or saved: it goes on from there, or
        began anew; what this one saves would be taken for what comes after that."""
        if self._known < 0 or max(self.store.all_committed(), default=-1) <= self._known:
            return
        try:
            newest = self._newest_manifest()
        except DamagedVersion:
            return
        if newest is None or newest.version <= self._known:
            return
        if newest.made.get("writer") != self._writer:  # else the answer to a save of its own was lost
            host = newest.made.get("host", "another process")
            raise Superseded(
                f"{self.url}: {host} has saved version {newest.version} meanwhile; the newest "
                f"that this process knows is {self._known}",
                rule="superseded",
                help="only one process may save to a path: trainer 0. Is an earlier one of this job still running? One "
                "that goes on from there loads it first",
            )

    def prune(self, told: Callable[[int], None] = lambda count: None) -> list[int]:
        """Deletes what is not to be kept, and what crashes left before the newest; returns these versions.

        The newest that is whole stays: it is read for that, and `told` gets the bytes. Raises DamagedVersion if none is
        whole: nothing is deleted then.
        """
        damaged = None
        for version in self.store.all_committed():
            try:
                self.store.verify(self.store.manifest(version), told)
                return self._collect(version)
            except DeletedVersion:
                return self.prune(told)
            except DamagedVersion as error:
                log.error("%s", error.message)
                damaged = error
        if damaged is not None:
            raise DamagedVersion(
                f"{self.url}: no checkpoint is whole, so none is deleted: {damaged.message}",
                rule="checkpoint",
                help="restore them from a copy; or delete that folder to begin anew",
            )
        return []

    def _collect(self, good: int) -> list[int]:
        """`good`: a version that is whole."""
        there = self.store.all_committed()
        values = [(v, self._value_of(v)) for v in there if v not in self._damaged]
        if self.keep.best and not any(value is not None for _, value in values):
            log.warning("keep best=%r: no checkpoint in %s has that metric; none is deleted", self.keep.best, self.url)
            return []
        return self.store.collect(max(there, default=0), {*self.keep.of(values), good})

    def _try_to_prune(self, good: int) -> None:
        """What cannot be deleted now goes with a later save."""
        try:
            self._collect(good)
        except Exception as error:
            log.warning("old checkpoints in %s stay for now: %s", self.url, describe(error))

    def _value_of(self, version: int) -> float | None:
        if not self.keep.best:
            return None
        if version not in self._values:
            try:
                metrics = TrainStatus.from_json(self.store.manifest(version).status).metrics
            except DamagedVersion:
                metrics = {}
            self._values[version] = metrics.get(self.keep.best)
        return self._values[version]

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
        with asking(self.url):
            known = max(answered(self.store.all_committed, self.url), default=-1)
        found = self.newest(version)
        if found is None:
            return None
        if left := load_found(found, targets, own, trainer_id, random_states, partial):
            log.warning(
                "checkpoint %d of %s is loaded in part; not loaded: %s", found.version, self.url, "; ".join(left)
            )
        self._saved, self._looked = (self._clock(), found.status.step), True
        self._known = max(known, found.version)  # what comes after that is another process's
        return found.status

    def newest(self, version: int | None = None) -> Found | None:
        """The newest checkpoint that is whole, or the one asked for; None if there is none at all.

        Damaged ones are named, and older ones looked at. Raises GraphftError[checkpoint] if all are damaged, or the one
        that was asked for is, or is not there; StorageFailed where the storage fails, which says nothing of them.
        """
        with asking(self.url):
            return self._newest(version)

    def _newest(self, version: int | None) -> Found | None:
        if version is not None:
            if not self.store.committed(version):
                raise GraphftError(
                    f"{self.url} has no checkpoint {version}; it has {self.store.all_committed()}",
                    rule="checkpoint",
                    help="give one of those",
                )
            return self._read(version)
        damaged: list[DamagedVersion] = []
        there = self.store.all_committed()
        if lost := [v for v in self.store.without_manifest() if v > max(there, default=-1)]:
            log.warning("%s: newer than what counts is checkpoint %d, which %s", self.url, lost[0], NO_MANIFEST)
        for candidate in there:
            try:
                found = self._read(candidate, to_go_on=not damaged)
            except DeletedVersion:
                return self._newest(None)
            except DamagedVersion as error:
                damaged.append(error)
                self._damaged.add(candidate)
                log.error("%s", error.message)
                continue
            if damaged:
                log.error("going back to checkpoint %d of %s, the newest that is whole", candidate, self.url)
            return found
        if damaged:
            raise DamagedVersion(
                f"{self.url}: none of its {len(damaged)} checkpoints is whole: "
                + "; ".join(error.message for error in damaged[:3]),
                rule="checkpoint",
                help="restore them from a copy; or delete that folder to begin anew",
            )
        self.store.check_place()
        return None

    def _read(self, version: int, *, to_go_on: bool = False) -> Found:
        manifest = self.store.manifest(version)
        tensors = self.store.read(manifest, to_go_on=to_go_on)
        try:
            return found_in(manifest, tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedVersion(
                f"checkpoint {version} of {self.url} does not say what its tensors are: {error!r}",
                rule="checkpoint",
                help="was it written by a newer graphft? its manifest names that under `made`",
            ) from error
