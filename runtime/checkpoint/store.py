"""The checkpoints of a job, in its folder or its storage. Which of them is *committed* is decided in etcd
(`checkpoint.commit`); what lies here is only what a commit may name."""

from __future__ import annotations

import functools
import logging
import posixpath
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.disk.fileio import fsync
from graphft.runtime.checkpoint.manifest import Manifest, Part, directory_key
from graphft.runtime.checkpoint.versioned_store import (
    MANIFEST,
    DamagedCheckpoint,
    StorageUnavailable,
    VersionedStore,
    storage,
)
from graphft.runtime.coordination.job_files import check_launcher, url_of
from graphft.runtime.fs import FS, LocalFS, file_system
from graphft.transpiler.record import RECORD

if TYPE_CHECKING:
    from torch import Tensor

    from graphft.transpiler.config import JobConfig

log = logging.getLogger("graphft")

FOLDER = "checkpoints"


class CheckpointStore(VersionedStore):
    """`shard`: async, the checkpoints of that shard alone; those of the job as a whole lie in the folder above.

    `job`: the path of a storage, in which the job's record lies; `may_write` raises if this machine is not to.
    """

    def __init__(
        self,
        root: str | Path,
        shard: int | None = None,
        fs: FS | None = None,
        url: str = "",
        job: str = "",
        may_write: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(fs or LocalFS(), str(root), url, "" if shard is None else f"shard-{shard}/")
        self._job, self._may_write = job, may_write

    def check_there(self, directory: str = "") -> None:
        """A file system that is not mounted is an empty folder: it lacks the job's record, and all its checkpoints. A
        checkpoint that is damaged leaves its folder, or its neighbours."""
        if self._job and self.fs.size(posixpath.join(self._job, RECORD)) is None:
            raise StorageUnavailable(
                f"nothing of the job is in {self.url}", rule="storage", help="mount the file system that holds it"
            )
        if directory and directory not in self.directories() and not self.manifests():
            raise StorageUnavailable(
                f"{self.where()} holds no checkpoint, though etcd names {directory}",
                rule="storage",
                help="mount the file system that holds them; if they are gone for good, start the job anew: in a new "
                "folder, under another name",
            )

    def write_part(self, *args: object, **kwargs: object) -> Part:
        self._may_write()
        part = super().write_part(*args, **kwargs)  # type: ignore[arg-type]
        self._may_write()  # else it may have gone into the folder that is there while nothing is mounted
        return part

    def write_manifest(self, manifest: Manifest) -> None:
        self._may_write()
        super().write_manifest(manifest)

    def make_durable(self, manifest: Manifest) -> None:
        """Has the file system write the entries of a checkpoint that was found here: the process that wrote it may have
        died between the last rename and the fsync of the folder. Raises StorageUnavailable."""
        if not isinstance(self.fs, LocalFS):
            return
        root = Path(self.root)
        files = [
            root / name for name in (*(p.file for p in manifest.parts), f"{self.inner}{manifest.directory}/{MANIFEST}")
        ]
        for folder in [*sorted({path.parent for path in files}), root]:
            with storage(folder):
                fsync(folder)

    def read_newest(
        self, run: str, shards: Sequence[int], step: int | None = None
    ) -> tuple[Manifest, list[dict[str, Tensor]]] | None:
        """Reads the newest checkpoint of a run (of its latest generation; of one step) that is whole. Returns its
        manifest, and what the shards held; None if there is none. Raises DamagedCheckpoint if none is whole."""
        own = [m for m in self.manifests() if m.run == run and step in (None, m.step)]
        newest_first = sorted(own, key=lambda m: (m.generation, m.step), reverse=True)
        return self.first_whole(
            [m.directory for m in newest_first], lambda m: (m, [self.read_part(m, shard)[0] for shard in shards])
        )

    def latest_generation(self) -> int:
        """Returns the highest generation that has left anything here; -1 if none has."""
        return max((directory_key(d)[1] for d in self.directories()), default=-1)

    def prune(self, keep: int, last_good: Manifest, used: Collection[str] = ()) -> None:
        """Deletes what is older than the newest `keep` usable checkpoints, and what crashes left behind. The folders in
        `used` stay.

        Never `last_good`, nor anything of a later step or generation, which may be being written. Raises
        StorageUnavailable, when it cannot be told what is usable, or be deleted.
        """
        kept, gone = 0, list[str]()
        for directory in self.directories():
            step, generation = directory_key(directory)
            if (step, generation) == (last_good.step, last_good.generation):
                kept += 1
            elif step >= last_good.step or generation > last_good.generation:
                continue
            elif (kept < keep or directory in used) and self._is_usable(directory):
                kept += directory not in used
            else:
                gone.append(directory)
        self.discard(gone)

    def _is_usable(self, directory: str) -> bool:
        try:
            self.read_manifest(directory)
        except DamagedCheckpoint:
            return False
        return True


def checkpoints_of(job_dir: Path, shard: int | None = None) -> CheckpointStore:
    """Returns the checkpoints of the job in this folder; `shard`: async, those of one shard."""
    url = url_of(job_dir)
    if not url:
        return CheckpointStore(job_dir / FOLDER, shard)
    fs, path = file_system(url)
    may_write = functools.partial(check_launcher, job_dir)
    return CheckpointStore(posixpath.join(path, FOLDER), shard, fs, f"{url}/{FOLDER}", path, may_write)


def saved_step(job_dir: Path, config: JobConfig) -> int | None:
    """As `read_saved_step`; None if what is there cannot be read now."""
    try:
        return read_saved_step(job_dir, config)
    except StorageUnavailable:
        return None


def read_saved_step(job_dir: Path, config: JobConfig) -> int:
    """Returns the step (async: batches) at which a run that is not running would go on: that of the newest whole
    checkpoint of its latest generation; 0 if there is none. Raises StorageUnavailable.

    Async, before the end: the lowest of the shards' own. A commit of which the process died at once may be one
    checkpoint behind.
    """

    def newest(store: CheckpointStore) -> int:
        return max(((m.generation, m.step) for m in store.manifests()), default=(0, 0))[1]

    step = newest(checkpoints_of(job_dir))
    if step == 0 and not config.sync:
        step = min(newest(checkpoints_of(job_dir, shard)) for shard in range(config.pservers))
    return step
