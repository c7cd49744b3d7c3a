"""The checkpoints of a job, in its folder, for `graphft checkpoint list`, `show` and `verify`. Nothing is changed."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from graphft.fileio import size_in_words
from graphft.runtime.checkpoint.manifest import Manifest, directory_key
from graphft.runtime.checkpoint.store import NO_MANIFEST, CheckpointStore, DamagedCheckpoint, StorageUnavailable
from graphft.runtime.checkpoint.stored_checkpoints import checkpoints_of
from graphft.transpiler.record import read_record


@dataclass(frozen=True)
class JobCheckpoint:
    """One that is there. `shard`: async, of this shard alone; None: of all. `damage`: why it cannot be used, or does
    not count (NO_MANIFEST); "" if its files have the sizes that its manifest says."""

    store: CheckpointStore
    directory: str
    shard: int | None
    manifest: Manifest | None
    damage: str
    foreign: bool
    """Whether another run wrote it."""
    unused: str = ""
    """Why no run goes on from it, whole as it may be."""

    @property
    def path(self) -> str:
        return self.store.where(self.directory)

    @property
    def bytes(self) -> int:
        return self.manifest.bytes if self.manifest is not None else 0

    def line(self) -> str:
        """For a table: step, generation, when, how large, whose, what is wrong with it."""
        if self.manifest is None:
            damaged = "DAMAGED: " * (self.damage != NO_MANIFEST)
            return f"{self.path}  {damaged}{self.damage}"
        of = "all shards" if self.shard is None else f"shard {self.shard}"
        note = "  of another run" if self.foreign else ""
        note += f"  {self.unused}" if self.unused else ""
        values = self.manifest.meta.get("metrics", {})
        if needed := {name.partition("/")[0] for part in self.manifest.parts for name in part.entry.needs}:
            note += f"  (a delta, needs files of {', '.join(sorted(needed))})"
        for name in sorted(values, key=lambda name: (name != "loss", name)):
            note += f"  {name} {values[name]:.6g}"
        size = size_in_words(self.bytes)
        return (
            f"{self.manifest.step:>9} {self.manifest.generation:>10}  {self._when():19}  {size:>10}  "
            f"{of}, in {len(self.manifest.parts)} part{'s' * (len(self.manifest.parts) != 1)}{note}"
        )

    def _when(self) -> str:
        at = self.manifest.meta.get("made", {}).get("at", 0) if self.manifest is not None else 0
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""

    def verify(self, told: Callable[[int], object] = id) -> str:
        """Reads every byte. What is wrong, in words; "" if nothing is. Raises StorageUnavailable."""
        if self.manifest is None:
            return self.damage
        for part in self.manifest.parts:
            try:
                self.store.read_part(self.manifest, part.shard)
            except DamagedCheckpoint as error:
                if not self.store.has_manifest(self.directory):
                    return GONE
                return error.message
            told(part.entry.bytes)
        return ""


BELOW = "below a loaded state: not used"
"""What is told of one that was there when other values were put in the place of its run's."""
GONE = "gone meanwhile: the job keeps newer ones"
"""What `verify` says of a checkpoint that the running job has deleted."""
_WHOSE = "(loss, metrics: means of the trainers' newest batches)"
HEAD = f"{'step':>9} {'generation':>10}  {'saved':19}  {'size':>10}  of  {_WHOSE}"


def job_checkpoints(folder: Path) -> list[JobCheckpoint]:
    """Of a job's folder, the newest first, whole or damaged, or without a manifest.

    Raises GraphftError for a folder that holds no job, StorageUnavailable.
    """
    record = read_record(folder)
    shards = [None, *range(record.config.pservers)] if not record.config.sync else [None]
    found = [c for shard in shards for c in _in_store(folder, shard, record.run_id)]
    needed = {posixpath.dirname(c.store.where(name)) for c in found if c.manifest for name in c.manifest.files()}
    found = [c for c in found if c.damage != NO_MANIFEST or c.path not in needed]
    return sorted(found, key=lambda c: directory_key(c.directory), reverse=True)


def _in_store(folder: Path, shard: int | None, run: str) -> Iterator[JobCheckpoint]:
    store = checkpoints_of(folder, shard)
    unused = _floor(store)
    for directory in store.directories():
        if not store.has_manifest(directory):
            yield JobCheckpoint(store, directory, shard, None, NO_MANIFEST, False)
            continue
        try:
            manifest = store.read_manifest(directory)
        except DamagedCheckpoint as error:
            yield JobCheckpoint(store, directory, shard, None, error.message, False)
        else:
            yield JobCheckpoint(store, directory, shard, manifest, "", manifest.run != run, unused(manifest))


def _floor(store: CheckpointStore) -> Callable[[Manifest], str]:
    """Why a checkpoint there does not count, whatever its own files are; "" if it does."""
    try:
        floor = store.floor()
    except StorageUnavailable as error:
        why = error.message
        return lambda manifest: f"not known whether it counts: {why}"
    return lambda manifest: "" if floor is None or floor.carries(manifest) else BELOW
