"""The end of an async job: a manifest of all shards' last checkpoints, each at its own version."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from graphft.runtime.checkpoint.commit import Commits, record_of
from graphft.runtime.checkpoint.manifest import PASSES, Manifest, Part
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint, storage
from graphft.runtime.checkpoint.writer import Saver
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Committed, decode
from graphft.runtime.etcd import mod_is, put_op


@dataclass(frozen=True, slots=True)
class AsyncCommits(Commits):
    """One shard's commits, and what the first shard does for all at the end. `keys` and `store` are the shard's own."""

    keys: Keys
    alone: bool = True

    def of(self, shard: int, job_dir: Path) -> AsyncCommits:
        """Returns the commits of another shard."""
        return dataclasses.replace(
            self, keys=self.keys.of_shard(shard), store=checkpoints_of(job_dir, shard), shard=shard
        )

    def commit_job(self, job_dir: Path, step: int) -> bool:
        """Commits the job's last checkpoint: the newest of every shard. False: one went back meanwhile, or has to.

        Raises StorageUnavailable.
        """
        parts: list[Part] = []
        versions, same = [], []
        told: dict[str, Any] = {}
        for shard in range(self.shards):
            kv = self.etcd.get(self.keys.of_shard(shard).committed)
            committed = decode(kv, Committed)
            if kv is None or committed is None:
                return False
            try:
                manifest = checkpoints_of(job_dir, shard).read_manifest(committed.checkpoint)
            except DamagedCheckpoint as error:
                self.of(shard, job_dir).rollback(error.message, below=committed.step)
                return False
            parts += manifest.parts
            versions.append(committed.step)
            told |= {key: value for key, value in manifest.meta.items() if key not in told and key != PASSES}
            same.append(mod_is(kv.key, kv.mod_revision))
        last = Manifest(0, step, self.run, tuple(parts), {**told, "versions": versions})
        whole = checkpoints_of(job_dir)
        with storage(whole.where()):
            whole.write_manifest(last)
        key = self.keys.of_job().committed
        before = self.etcd.get(key)
        return self.etcd.txn(
            [*same, mod_is(key, before.mod_revision if before is not None else 0)],
            [put_op(key, msgspec.json.encode(record_of(last)))],
        ).ok


class AsyncSaver(Saver):
    """The saver of an async shard."""

    commits: AsyncCommits

    def redo(self, committed: Committed, error: DamagedCheckpoint) -> None:
        """A shard's last checkpoint cannot be read: that shard goes back to one that can, and the job goes on."""
        self.events.emit("damaged-checkpoint", f"the final checkpoint is damaged: {error.message}")
        self.commits.etcd.delete(self.commits.keys.of_job().committed)
        for shard in range(self.commits.shards):
            commits = self.commits.of(shard, self.job_dir)
            last = decode(commits.etcd.get(commits.keys.committed), Committed)
            if last is not None and not _readable(commits, last):
                commits.rollback("its final checkpoint is damaged", below=last.step)


def _readable(commits: Commits, committed: Committed) -> bool:
    try:
        commits.store.read_part(commits.store.read_manifest(committed.checkpoint), commits.shard)
    except DamagedCheckpoint:
        return False
    return True
