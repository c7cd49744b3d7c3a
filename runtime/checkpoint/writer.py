"""Writes checkpoints beside the steps: one background thread per shard, and what it has still to write."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from graphft.disk.tensor_file import write_tensors
from graphft.runtime.checkpoint.commit import Commits, record_of
from graphft.runtime.checkpoint.manifest import DECIDED, MADE, VALIDATE, Manifest, Part, made, recorded, skipped_in
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint, StorageUnavailable
from graphft.runtime.coordination.event_log import Events
from graphft.runtime.coordination.job_files import MODEL, check_launcher, publish_result, url_of
from graphft.runtime.coordination.records import Committed, Failure, Validating, decode
from graphft.runtime.coordination.result_files import discarded_of, take_validations, write_discarded
from graphft.runtime.coordination.run_record import tell_failed
from graphft.runtime.coordination.status import read_discards
from graphft.runtime.etcd import TransientEtcdError, put_op, value_is
from graphft.runtime.execute.finite import in_words, nonfinite_of
from graphft.transpiler.layout import SKIPPED_STEPS, assemble

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

NONFINITE = "nonfinite"
"""In the metadata of a model: what of it is not finite, in words."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 5.0
PUBLISH_SECONDS = 5.0
"""A part whose checkpoint is not committed after so long is recorded again."""
MISTAKES = (FileExistsError, NotADirectoryError, IsADirectoryError)
"""Errors that no waiting mends: something else lies where the checkpoints should."""


KEEP, KEEP_VALIDATED = 2, 8
"""Snapshots that may wait, beside the one that is being written, and others that are to be validated: each is as large
as the shard."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A shard's state at one step. Nothing in it changes any more. `meta`: the manifest's."""

    generation: int
    step: int
    values: Mapping[str, Tensor]
    keep: int
    ledger: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def validated(self) -> bool:
        """True if the model is to be validated at this step."""
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


class PendingSnapshots:
    """A bounded queue between a shard's loop and the thread that writes.

    Which snapshots are given up is a function of their steps alone, and so the same on all shards: those that are left
    become whole, although each shard writes at a pace of its own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Snapshot] = []
        self._final: Committed | None = None
        self._again: Published | None = None
        self._closed = False

    def add(self, work: Work) -> list[Snapshot]:
        """Takes in work: a snapshot behind the older ones; returns those that were given up for it."""
        given_up = []
        with self._changed:
            if isinstance(work, Committed):
                self._final = work
            elif isinstance(work, Published):
                self._again = work
            else:
                self._waiting = sorted([*self._waiting, work], key=lambda s: (s.generation, s.step))
                newest = self._waiting[-1]
                for validated, most in ((False, KEEP), (True, KEEP_VALIDATED)):
                    while len(alike := [s for s in self._waiting if s.validated is validated]) > most:
                        least = min(
                            (s for s in alike if s is not newest), key=lambda s: (s.generation, s.step & -s.step)
                        )
                        self._waiting.remove(least)
                        given_up.append(least)
            self._changed.notify_all()
        return given_up

    def take(self) -> Work | None:
        """Returns the oldest work there is, as soon as there is some; None: this queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting or self._final or self._again)
            if self._closed:
                return None
            if self._waiting:
                return self._waiting.pop(0)
            if self._again is not None:
                again, self._again = self._again, None
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


class Saver:
    """Writes this shard's parts in order, and commits a checkpoint when its part was the last.

    While etcd does not answer, or the storage fails, the thread retries and the job goes on. When more snapshots wait
    than `PendingSnapshots` keeps, some are given up. An unexpected error ends the thread, and `check` raises it in the
    shard's loop.
    """

    def __init__(
        self, commits: Commits, events: Events, job: Job, job_dir: Path, close_records: Callable[[], None]
    ) -> None:
        """`close_records`: what is to be done in etcd before the job is called complete. It may be repeated."""
        self.commits, self.events, self.job, self.job_dir = commits, events, job, job_dir
        self._close_records = close_records
        self._initial = job.pserver_program(commits.shard).values
        self.counters: Counter[str] = Counter()
        self.before: Callable[[], object] = lambda: None
        """Called before a part is written, in the saver's thread."""
        self._pending = PendingSnapshots()
        self._failure: BaseException | None = None
        self._finishing = False
        self._pause = RETRY_SECONDS
        self._last: Manifest | None = None
        """The manifest that this shard committed last."""
        self._published: Published | None = None
        self._published_at = 0.0
        self._failing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def submit(self, snapshot: Snapshot) -> None:
        """Saves this shard's part of a checkpoint."""
        self._give_up(self._pending.add(snapshot))

    def finish(self, committed: Committed) -> None:
        """Writes the trained model from the final checkpoint and completes the job. Repeats meanwhile do nothing."""
        if not self._finishing:
            self._finishing = True
            self._pending.add(committed)

    def committed_in(self, generation: int) -> Committed | None:
        """The newest checkpoint that this shard has committed in this generation, as far as it knows."""
        last = self._last
        return record_of(last) if last is not None and last.generation == generation else None

    def look_after_part(self, generation: int, known: Committed | None) -> None:
        """Has the part that this shard recorded last recorded again, when its checkpoint is not committed after a
        while: an etcd that was restored from a backup may know nothing of it. `generation`: the one that the shard is
        in; `known`: the newest committed checkpoint."""
        published = self._published
        if published is None or published.generation != generation or (known and known.step >= published.step):
            return
        if time.monotonic() - self._published_at > PUBLISH_SECONDS:
            self._published_at = time.monotonic()
            self._pending.add(published)

    def check(self) -> None:
        """Raises what the thread died of."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._pending.close()
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (work := self._pending.take()) is not None:
                self._try(work)
        except BaseException as error:
            self._failure = error

    def _try(self, work: Work) -> None:
        try:
            if isinstance(work, Snapshot):
                self._save(work)
            elif isinstance(work, Published):
                self._publish(work)
            else:
                self._finish(work)
        except TransientEtcdError as error:
            self.events.log.warning("checkpoint: etcd: %s; trying again", error.message)
            self._again(work, RETRY_SECONDS)
        except MISTAKES:
            raise
        except OSError as error:
            self._tell_trouble(error)
            self._again(work, self._pause)
            self._pause = min(2 * self._pause, MAX_RETRY_SECONDS)
        else:
            self._pause = RETRY_SECONDS
            self._tell_mended()

    def _again(self, work: Work, pause: float) -> None:
        """Queues the work again after a pause (in seconds): something newer may be worth more by then. A part that is
        to be recorded again is asked for once more, if that is still of use."""
        self.counters["checkpoint-retries"] += 1
        if not self._pending.pause(pause) and not isinstance(work, Published):
            self._give_up(self._pending.add(work))

    def _give_up(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            self.counters["checkpoints-given-up"] += 1
            self.events.log.warning(
                "the checkpoint of step %d is given up for newer ones: writing is slow, or fails", snapshot.step
            )
            if snapshot.validated:
                self.events.emit(
                    "validation-lost",
                    f"the validation of step {snapshot.step} is LEFT OUT: its checkpoint could not be written in time",
                    step=snapshot.step,
                )

    def _tell_trouble(self, error: OSError) -> None:
        text = error.message if isinstance(error, StorageUnavailable) else str(error)
        if self._failing_since is not None:
            self.events.log.warning("checkpoint: %s; trying again", text)
            return
        self._failing_since = time.monotonic()
        self.events.emit(
            "checkpoint-trouble",
            f"shard {self.commits.shard} cannot write its checkpoint ({text}); training goes on, and it tries again: "
            "free some space, or mend the storage",
            shard=self.commits.shard,
        )

    def _tell_mended(self) -> None:
        if self._failing_since is not None:
            seconds = time.monotonic() - self._failing_since
            self.events.emit(
                "checkpoint-mended",
                f"shard {self.commits.shard} writes its checkpoints again, after {seconds:.0f} s",
                shard=self.commits.shard,
            )
        self._failing_since = None

    def _save(self, item: Snapshot) -> None:
        commits = self.commits
        if not self._may_be_saved(item):
            return
        self.before()
        part = commits.store.write_part(
            item.generation, item.step, commits.shard, commits.shards, item.values, item.ledger
        )
        self._publish(Published(item.generation, item.step, part, item.keep, {**self._meta(item), **self._decided()}))

    def _meta(self, item: Snapshot) -> dict[str, Any]:
        """Returns the manifest's metadata. Raises EtcdError."""
        commits = self.commits
        return {**item.meta, **recorded(commits.etcd, commits.keys), **skipped_in(item.values), MADE: made()}

    def _decided(self) -> dict[str, Any]:
        """Returns what follows from the validations so far, if a job decides by them."""
        validate = self.job.config.validate
        kv = self.commits.etcd.get(self.commits.keys.decided) if validate is not None and validate.criteria else None
        return {DECIDED: msgspec.json.decode(kv.value)} if kv is not None else {}

    def _publish(self, item: Published) -> None:
        manifest = self.commits.publish(item.generation, item.step, item.part, item.meta)
        self._published, self._published_at = (item if manifest is None else None), time.monotonic()
        if manifest is not None:
            self._last = manifest
            self.events.log.info("checkpoint of step %d is committed", item.step)
            with contextlib.suppress(StorageUnavailable, TransientEtcdError):  # what is left goes with a later one
                self.commits.store.prune(item.keep, manifest, self._used())

    def _used(self) -> set[str]:
        """Checkpoints that are being validated."""
        if self.job.config.validate is None:
            return set()
        kvs = self.commits.etcd.range(self.commits.keys.all_validating).kvs
        return {msgspec.json.decode(kv.value, type=Validating).checkpoint for kv in kvs}

    def _may_be_saved(self, item: Snapshot) -> bool:
        """Returns True if all is finite, or the job goes on with what is not. What trainers look at does not show it
        all: an update may overflow, and so may a buffer or the optimizer's state. A generation that is over does not
        count."""
        bad = nonfinite_of(item.values, self._initial)
        if not bad or not self.commits.is_current(item.generation):
            return True
        what = f"step {item.step}: {in_words(bad)} of shard {self.commits.shard} are not finite"
        if self.job.config.on_nonfinite != "stop":
            if not self.counters["checkpoints-not-finite"]:
                self.events.emit("nonfinite", f"{what}; training goes on, as on_nonfinite says")
            self.counters["checkpoints-not-finite"] += 1
            return True
        why = Failure(
            f"{what}, although losses and gradients were; the checkpoints before that are good",
            "take a lower learning rate, clip the gradients, or look for very large values in the data; "
            'on_nonfinite="warn" goes on all the same',
        )
        tell_failed(self.commits.etcd, self.commits.keys, why)
        self.events.emit("nonfinite", f"the job ends: {why.reason}")
        return False

    def _finish(self, committed: Committed) -> None:
        commits, store = self.commits, checkpoints_of(self.job_dir)  # async, the commits' own is that of one shard
        try:
            manifest = store.read_manifest(committed.checkpoint)
            shards = [store.read_part(manifest, i)[0] for i in range(commits.shards)]
        except DamagedCheckpoint as error:
            self.redo(committed, error)
            self._finishing = False
            return
        write_discarded(self.job_dir, discarded_of(self.job.config, read_discards(commits.etcd, commits.keys)))
        if self.job.config.validate is not None:  # those that were validated last stayed for it
            with contextlib.suppress(StorageUnavailable):
                store.prune(self.job.config.keep_checkpoints, manifest)
            take_validations(commits.etcd, commits.keys, self.job_dir)
        model, stored = self.job_dir / MODEL, bool(url_of(self.job_dir))
        lost = _lost(shards, [self.job.pserver_program(i).values for i in range(commits.shards)])
        pending = self.job_dir / f".{MODEL}" if stored else model  # the model says that the job is complete
        write_tensors(pending, assemble(self.job.trainer_program(), shards), lost)
        if stored:
            check_launcher(self.job_dir)
            publish_result(self.job_dir, pending)
        self._close_records()
        state = commits.keys.state
        if commits.etcd.txn([value_is(state, b"running")], [put_op(state, b"complete")], token=state).ok:
            self._close_records()  # once more: etcd may have been restored from a backup in between
            self.events.emit("complete", f"the model is in {model}", path=str(model))

    def redo(self, committed: Committed, error: DamagedCheckpoint) -> None:
        """Everyone goes back to a checkpoint that can be read, unlike the final one, and trains to the end again."""
        if decode(self.commits.etcd.get(self.commits.keys.committed), Committed) == committed:
            generation = self.commits.rollback("the final checkpoint is damaged", below=committed.step)
            self.events.emit(
                "damaged-checkpoint",
                f"the final checkpoint is damaged, going back to step {generation.step}: {error.message}",
                step=generation.step,
            )


def _lost(shards: Sequence[Mapping[str, Tensor]], initial: Sequence[Mapping[str, Tensor]]) -> dict[str, str] | None:
    """The model's metadata: how many steps (async: of the shard that left out the most) were left out as not finite,
    and which variables are not finite."""
    counts = [int(values[SKIPPED_STEPS]) for values in shards if SKIPPED_STEPS in values]
    bad: dict[str, int] = {}
    for values, first in zip(shards, initial, strict=True):
        bad |= nonfinite_of(values, first)
    found = {SKIPPED_STEPS: str(max(counts))} if counts else {}
    return (found | ({NONFINITE: in_words(bad)} if bad else {})) or None
