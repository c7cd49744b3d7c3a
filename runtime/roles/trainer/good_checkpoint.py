"""The newest checkpoint that holds finite values only, for a person whose job has failed because others came up."""

from __future__ import annotations

from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore, checkpoints_of
from graphft.runtime.coordination.member import Member
from graphft.runtime.execute.finite import no_longer_finite


def newest_good_checkpoint(member: Member, job_dir: Path) -> str:
    """Where it is, in words. Reads checkpoints, newest first, until one is good; never fails."""
    config = member.config
    if not config.ft:
        return "there is no checkpoint: the job has no fault tolerance"
    stores = [checkpoints_of(job_dir, shard) for shard in ([None] if config.sync else range(config.pservers))]
    try:
        found = [_newest(member, store) for store in stores]
    except GraphftError as error:
        return f"which checkpoint is the newest good one cannot be told: {error.message}"
    if None in found:
        return "no checkpoint that is committed so far holds finite values only"
    named = ", ".join(
        f"step {m.step} ({store.where(m.directory)})" for store, m in zip(stores, found, strict=True) if m is not None
    )
    return f"the newest good checkpoint is that of {named}"


def _newest(member: Member, store: CheckpointStore) -> Manifest | None:
    for manifest in store.manifests():
        mine = manifest.run == member.job.run_id
        if mine and all(_is_good(member, store, manifest, part.shard) for part in manifest.parts):
            return manifest
    return None


def _is_good(member: Member, store: CheckpointStore, manifest: Manifest, shard: int) -> bool:
    member.progress.beat()
    tensors, _ = store.read_part(manifest, shard)
    return not no_longer_finite(tensors, member.job.pserver_program(shard).values)
