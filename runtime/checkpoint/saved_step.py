"""At which step a run that is not running would go on: read from its folder, without etcd and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphft.runtime.checkpoint.store import CheckpointStore, StorageUnavailable
from graphft.runtime.checkpoint.stored_checkpoints import checkpoints_of

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


def saved_step(job_dir: Path, config: JobConfig) -> int | None:
    """As `read_saved_step`; None if what is there cannot be read now."""
    try:
        return read_saved_step(job_dir, config)
    except StorageUnavailable:
        return None


def read_saved_step(job_dir: Path, config: JobConfig) -> int:
    """Step (async: batches) of the newest whole checkpoint in the folder; 0 if there is none.

    Async, before the end: the lowest of the shards' own. A commit of which the process died at once may be one
    checkpoint behind. Raises StorageUnavailable.
    """
    step = _newest(checkpoints_of(job_dir))
    if step == 0 and not config.sync:
        step = min(_newest(checkpoints_of(job_dir, shard)) for shard in range(config.pservers))
    return step


def _newest(store: CheckpointStore) -> int:
    """Step of the newest whole checkpoint of the latest generation that left one; 0 if there is none."""
    found = store.manifests()
    return max(((m.generation, m.step) for m in found), default=(0, 0))[1]
