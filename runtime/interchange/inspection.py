"""`graphft checkpoint list`, `show` and `verify`. All are safe to run beside what saves there: a checkpoint
that it deletes meanwhile is passed over."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphft.disk.fileio import size_in_words
from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.manifest import DISCARDED, MADE, Manifest, directory_key
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.versioned_store import (
    NO_MANIFEST,
    NOTE,
    DamagedCheckpoint,
    DeletedCheckpoint,
    VersionedStore,
)
from graphft.runtime.coordination.job_files import MODEL
from graphft.runtime.interchange.training_state import LOOKS, job_folder
from graphft.runtime.interchange.weights import read_weights
from graphft.runtime.loop.check_points import CheckPoints
from graphft.runtime.loop.snapshot import STATUS, TrainStatus
from graphft.runtime.process.metric_table import read_rows
from graphft.transpiler.record import read_record

HEAD = f"{'version':>9}  {'saved':19}  {'size':>10}  (of a job, the version is the step)"


@dataclass(frozen=True)
class Entry:
    """A checkpoint that is there. `manifest`: None if it cannot be used, or does not count (NO_MANIFEST): `damage` says
    why. `run`: of the job, whose table has `metrics` of the version's step."""

    store: VersionedStore
    directory: str
    manifest: Manifest | None
    damage: str = ""
    run: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.store.where(self.directory)

    def line(self) -> str:
        """Returns a line of a table."""
        version, manifest = directory_key(self.directory)[0], self.manifest
        if manifest is None:
            return f"{version:>9}  {self.path} {'' if self.damage == NO_MANIFEST else 'is DAMAGED: '}{self.damage}"
        at = manifest.meta.get(MADE, {}).get("at", 0)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""
        if STATUS in manifest.meta:
            status = TrainStatus.from_json(manifest.meta[STATUS])
            words = [f"epoch {status.next()}, step {status.step}, offset {status.offset}"]
            metrics: Mapping[str, float] = status.metrics
        else:
            of = self.store.inner.strip("/") or f"{len(manifest.parts)} shards"
            words = [f"generation {manifest.generation}, {of}"]
            words += ["of another run"] if manifest.run != self.run else []
            metrics = self.metrics
        words += [f"{name} {metrics[name]:.6g}" for name in sorted(metrics, key=lambda name: (name != "loss", name))]
        return f"{version:>9}  {when:19}  {size_in_words(manifest.bytes):>10}  {'  '.join(words)}"


def entries(path: str, version: int | None = None) -> list[Entry]:
    """Returns the checkpoints of a job or a loop, the newest first, whole or damaged, or without a manifest.

    Raises UsageError[no-checkpoint] if there are none, or none of this version.
    """
    for _ in range(LOOKS):  # all that were listed may be deleted before they are read, while newer ones come
        found = _entries(path)
        if wanted := [entry for entry in found if version in (None, directory_key(entry.directory)[0])]:
            return wanted
    what = "" if version is None else f" {version}; it has {sorted({directory_key(e.directory)[0] for e in found})}"
    help = "give a job's name, folder or storage, or the path that save_check_point was given"
    raise UsageError(f"{path} has no checkpoint{what}", rule="no-checkpoint", help=help)


def _entries(path: str) -> list[Entry]:
    with job_folder(path) as folder:
        if folder is None:
            place = CheckPoints(path)
            if not place.fs.stat(place.path):
                help = "is the path right, what holds it mounted, and the bucket there?"
                raise UsageError(f"there is nothing at {path}", rule="no-checkpoint", help=help)
            stores: list[VersionedStore] = [place.store]
            run = ""
        else:
            record = read_record(folder)
            shards = [None, *range(record.config.pservers)] if not record.config.sync else [None]
            stores, run = [checkpoints_of(folder, shard) for shard in shards], record.run_id
        found = [entry for store in stores for entry in _in_store(store, run)]
        if folder is not None and record.config.sync:
            found = [replace(entry, metrics=_metrics_of(folder, entry.directory)) for entry in found]
    found.sort(key=lambda entry: directory_key(entry.directory), reverse=True)
    return found


def _metrics_of(folder: Path, directory: str) -> dict[str, float]:
    step = directory_key(directory)[0]
    return dict(next(iter(read_rows(folder, step - 1, 1).steps()), (0, {}))[1]) if step else {}


def _in_store(store: VersionedStore, run: str) -> Iterator[Entry]:
    for directory in store.directories():
        try:
            yield Entry(store, directory, store.read_manifest(directory), run=run)
        except DeletedCheckpoint:
            continue
        except DamagedCheckpoint as error:
            yield Entry(store, directory, None, error.message)
    yield from (Entry(store, directory, None, NO_MANIFEST) for directory in store.unfinished())


def list_(options: argparse.Namespace) -> int:
    print("\n".join([HEAD, *(entry.line() for entry in entries(options.path))]))
    return 0


def show_(options: argparse.Namespace) -> int:
    found = entries(options.path, options.version)
    entry = next((entry for entry in found if entry.manifest is not None), None)
    if entry is None:
        raise GraphftError(found[0].line().strip(), rule="checkpoint", help="none is whole: graphft checkpoint verify")
    try:
        print("\n".join(_described(entry)))
    except DeletedCheckpoint:
        return show_(options)  # there is a newer one by now
    return 0


def _described(entry: Entry) -> Iterator[str]:
    manifest = entry.manifest
    assert manifest is not None
    meta = manifest.meta
    yield entry.line().strip()
    of = [f"run {manifest.run}"] * bool(manifest.run)
    yield "  ".join([*of, *(f"{name} {value}" for name, value in meta.get(MADE, {}).items() if name != "at")])
    for chunk, discarded in meta.get(DISCARDED, {}).items():
        yield f"discarded of chunk {chunk}  (`records`: their places in the chunk, from 0)  {discarded}"
    for part in manifest.parts:
        yield f"{part.file}  {size_in_words(part.bytes)}"
        header = entry.store.header_of(manifest, part)
        yield from [f"  ledger  {ledger}" for ledger in [header.metadata.get(NOTE)] if ledger]
        for name, (dtype, shape) in header.layout.items():
            yield f"  {name}  {str(dtype).removeprefix('torch.')} {tuple(shape)}"


def verify_(options: argparse.Namespace) -> int:
    """Returns 1 if something is damaged, or nothing is there that counts."""
    path, damaged, counted = options.path, 0, 0
    for entry in entries(path, options.version):
        wrong = entry.damage
        try:
            if entry.manifest is not None:
                entry.store.verify(entry.manifest)
                wrong = f"good ({size_in_words(entry.manifest.bytes)})"
                counted += 1
        except DeletedCheckpoint:
            wrong = "deleted meanwhile"
            counted += 1
        except DamagedCheckpoint as error:
            wrong = error.message
            damaged += 1
        damaged += entry.manifest is None and entry.damage != NO_MANIFEST
        print(f"{entry.path}: {wrong}")
    with job_folder(path) as folder:
        whole = folder is not None and options.version is None
    place = CheckPoints(path)
    if whole and place.fs.size(f"{place.path}/{MODEL}") is not None:
        try:
            wrong = f"good ({size_in_words(sum(tensor.nbytes for tensor in read_weights(path).values()))})"
        except GraphftError as error:
            wrong, damaged = error.message, damaged + 1
        print(f"{path}/{MODEL}: {wrong}")
    return 1 if damaged or not counted else 0
