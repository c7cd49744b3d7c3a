"""Checkpoints of a training loop: saved in the foreground or beside it, and found again.

`save_check_point` and `load_check_point` are those of the design "Fault tolerance for sync training" of PaddlePaddle.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from torch import Tensor

from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Program
from graphft.runtime.checkpoint.manifest import LOOP, MADE, Manifest, directory_key, directory_name, is_directory, made
from graphft.runtime.checkpoint.versioned_store import (
    MANIFEST,
    NO_MANIFEST,
    DamagedCheckpoint,
    DeletedCheckpoint,
    VersionedStore,
    unavailable,
)
from graphft.runtime.fs import FS, file_system
from graphft.runtime.loop.snapshot import (
    OPTIMIZERS,
    PARAMETERS,
    STATUS,
    Found,
    PerRank,
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
Saving = Future["int | None"]

TRIES, FIRST_PAUSE, LAST_PAUSE = 8, 0.5, 30.0
"""A save that the storage refuses is tried again so often, with pauses (seconds) that double."""
HOPELESS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
"""Errors of a storage that are no other when it is tried again."""
WRITER = "writer"
"""In a manifest's `made`: which object saved the version."""


def superseded(what: str) -> GraphftError:
    """Returns the error of two that save to one place: another has committed this version, or a later one."""
    return GraphftError(
        what,
        rule="superseded",
        help="only one process may save to a path: trainer 0. Is an earlier one of this job still running? One that "
        "goes on from there loads it first",
    )


class LoopStore(VersionedStore):
    """A version has one file; its manifest is made only if there is none: that is the commit."""

    def versions(self) -> list[int]:
        """Returns all that left a folder, whole or not; the newest first."""
        return [number for number, generation in map(directory_key, self.directories()) if generation == LOOP]

    def all_committed(self) -> list[int]:
        """Returns the versions that count, if they are not damaged; the newest first.

        While another process saves and deletes here, all that were listed may be gone when they are looked at.
        """
        found: list[int] = []
        listed: list[int] = []
        while not found and listed != (now := self.versions()):
            listed, found = now, [version for version in now if self.committed(version)]
        return found

    def committed(self, version: int) -> bool:
        """True if it has a manifest: then it counts, if it is not damaged."""
        return self.has_manifest(directory_name(LOOP, version))

    def manifest(self, version: int) -> Manifest:
        """Raises DamagedCheckpoint; DeletedCheckpoint where there is none."""
        return self.read_manifest(directory_name(LOOP, version))

    def write(self, version: int, meta: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Writes a version and commits it. Raises OSError, GraphftError[superseded]; GraphftError[save] for a dtype
        that cannot be saved."""
        part = self.write_part(LOOP, version, 0, 1, tensors)
        newer = [v for v in self.all_committed() if v > version]
        if newer or not self.create_manifest(Manifest(LOOP, version, "", (part,), meta)):
            self.fs.delete(self._at(part.file))
            raise superseded(f"{self.url}: another process has saved version {max([version, *newer])} meanwhile")

    def collect(self, keep: Collection[int]) -> None:
        """Deletes the versions older than the newest, but for those to keep; also what crashes left behind."""
        self.discard([directory_name(LOOP, v) for v in self.versions() if v < max(keep) and v not in keep])


class CheckPoints:
    """The checkpoints of a training loop in one place; what `save_check_point` and `load_check_point` are made of.

        checkpoints = graphft.CheckPoints("s3://bucket/run", keep=3)
        saving = checkpoints.begin(state, graphft.TrainStatus(epoch))      # goes on beside the loop

    `save` and `begin` are for one thread of one process: that of trainer 0. A program that ends waits for what
    it has begun to save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fs: FS | None = None,
        *,
        keep: int = 3,
        storage_options: Mapping[str, Any] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """The arguments are those of `save_check_point`."""
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one version is kept", rule="keep", help="keep=3")
        self.url = path = os.fspath(path)
        self.fs, self.path = (fs, path) if fs is not None else file_system(path, storage_options)
        self.keep, self._sleep = keep, sleep
        self.store = LoopStore(self.fs, self.path, self.url)
        self._changed = threading.Condition()
        self._waiting: tuple[Snapshot, Saving] | None = None
        self._thread: threading.Thread | None = None
        self._writer, self._known = uuid.uuid4().hex[:12], -1
        """Tells this object's versions; the newest version when it loaded or saved last, -1 before that."""

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, state: Any, status: TrainStatus, *, main_program: Program | None = None) -> int:
        """Saves now; returns the version. Raises StorageUnavailable after TRIES, GraphftError for what cannot be
        saved."""
        targets, saving = stateful_objects(state, main_program), Saving()
        self.wait()
        self._write(take(targets, status, copy=False), saving)
        version = saving.result()
        assert version is not None
        return version

    def begin(self, state: Any, status: TrainStatus, *, main_program: Program | None = None) -> Saving:
        """Copies the state, and saves it beside what goes on. One save is at work; of those that wait, the newest.

        The result of the `concurrent.futures.Future` is the version; None if a newer one took its place.
        """
        snapshot, saving = take(stateful_objects(state, main_program), status, copy=True), Saving()
        with self._changed:
            if self._waiting is not None:
                self._waiting[1].set_result(None)
            self._waiting = snapshot, saving
            if self._thread is None:
                # No daemon: a program that ends waits for what it has begun to save.
                self._thread = threading.Thread(target=self._run, name=f"checkpoints {self.url}")
                self._thread.start()
        return saving

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
        pause, version, tries = FIRST_PAUSE, None, 0
        while version is None:
            tries += 1
            try:
                version = self._commit(snapshot)
            except BaseException as error:
                if not self._may_succeed(error, tries):
                    step = snapshot.meta[STATUS]["step"]
                    log.error("the checkpoint of step %d to %s was NOT saved: %s", step, self.url, describe(error))
                    if isinstance(error, OSError) and not isinstance(error, GraphftError):
                        error = unavailable(self.url, error)
                    saving.set_exception(error)
                    return
                log.warning("checkpoint in %s: %s; trying again in %.1f s", self.url, describe(error), pause)
                self._sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
        saving.set_result(version)
        try:
            self.store.collect(self.store.all_committed()[: self.keep])
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

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(
        self, state: Any, *, main_program: Program | None = None, version: int | None = None, trainer_id: int = 0
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
        if trainer_id == 0 and not of_ranks:
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
        while versions := self.store.all_committed():
            with contextlib.suppress(DeletedCheckpoint):  # by the process that saves here: there is a newer one by now
                return self.store.first_whole([directory_name(LOOP, v) for v in versions], self._read)
        above, name = posixpath.split(self.path.rstrip("/"))
        if is_directory(name) and self.fs.size(posixpath.join(self.path, MANIFEST)) is not None:
            raise GraphftError(
                f"{self.url} is a version of a checkpoint, not the place where they are saved",
                rule="checkpoint",
                help=f"give {above}; and version={int(name.rpartition('-')[2])} for this one",
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


def save_check_point(
    executor: Any,
    train_status: TrainStatus,
    path: str | os.PathLike[str],
    fs: FS | None = None,
    trainer_id: int = 0,
    *,
    main_program: Program | None = None,
    keep: int = 3,
    storage_options: Mapping[str, Any] | None = None,
) -> int | None:
    """Saves the state of a training loop as the next version in a folder: wholly, or not at all.

        graphft.save_check_point({"model": model, "optimizer": optimizer}, graphft.TrainStatus(epoch), "checkpoints")

    Args:
        executor: What to save: objects with `state_dict()` and `load_state_dict()`, by name; one such object; or a
            `graphft.Executor`, with the program in `main_program`.
        train_status: Where the loop is: what `load_check_point` returns.
        path: A folder, or a URL that fsspec knows (s3://bucket/run, gs://..., memory://...).
        fs: The file system that `path` is on; by default that of the URL, else this machine's.
        trainer_id: Only trainer 0 saves; for others nothing is done (call it in all of them, or in trainer 0 alone; in
            all of them where the state has a `graphft.PerRank`).
        keep: How many of the newest versions are kept. Older ones are deleted, never the newest good one.
        storage_options: Go to fsspec, with a URL.

    Returns:
        The version, when it is committed. Of a trainer that does not save, None. `graphft.CheckPoints(path).begin(...)`
        saves while the loop goes on.

    Raises:
        GraphftError: [state] or [save] for what cannot be saved, [superseded] if another process saves here, too.
        StorageUnavailable: [storage], an OSError, too: the storage refused it eight times, within about a minute; at
            once where it is not there.
    """
    targets = stateful_objects(executor, main_program)  # a mistake shows in every trainer
    train_status.to_json()
    if trainer_id != 0:
        for each in targets.values():
            if isinstance(each, PerRank):
                each.state_dict()  # it is a collective
        return None
    place = CheckPoints(path, fs, keep=keep, storage_options=storage_options)
    return place.save(executor, train_status, main_program=main_program)


def load_check_point(
    executor: Any,
    path: str | os.PathLike[str],
    fs: FS | None = None,
    trainer_id: int = 0,
    *,
    main_program: Program | None = None,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TrainStatus | None:
    """Gives the objects the state of the newest checkpoint that is whole, and returns where the loop was.

    None, and nothing is changed, where there is no checkpoint. The arguments are those of `save_check_point`; all
    trainers load. `version`: another one than the newest. Trainer 0 goes on with its random numbers; with a `PerRank`
    in the state, every trainer does.

    Raises:
        GraphftError: [checkpoint] if no checkpoint is whole; [checkpoint-fit] if the objects are not those that were
            saved: nothing is changed then (`read_check_point` gives the states, to load what fits of them).
        StorageUnavailable: [storage], an OSError, too: the storage fails, so nothing can be said of the checkpoints.
    """
    place = CheckPoints(path, fs, storage_options=storage_options)
    return place.load(executor, main_program=main_program, version=version, trainer_id=trainer_id)


def read_check_point(
    path: str | os.PathLike[str],
    fs: FS | None = None,
    *,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Found | None:
    """Returns the newest checkpoint that is whole, as it was saved: `states` by name, `status`, `random`; None if
    there is none.

    For what `load_check_point` does not do: to load a part that one chooses, or into something else.
    """
    return CheckPoints(path, fs, storage_options=storage_options).newest(version)
