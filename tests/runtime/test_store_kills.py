"""The processes of a job are killed at any operation of a checkpoint, the newest that was
committed is whole, always, and what the killed ones left costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphft.runtime.checkpoint.manifest import Manifest
from graphft.runtime.checkpoint.store import CheckpointStore
from tests.support.killing import die_at

SHARDS, KEEP = 2, 2


def opened(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def values(step: int, shard: int) -> dict[str, torch.Tensor]:
    return {"table": torch.full((100,), float(step)), "step": torch.tensor(step * 10 + shard)}


def checkpoint(stores: list[CheckpointStore], step: int) -> None:
    parts = tuple(store.write_part(0, step, s, SHARDS, values(step, s)) for s, store in enumerate(stores))
    manifest = Manifest(0, step, "program", parts, {})
    stores[0].write_manifest(manifest)
    stores[0].prune(KEEP, manifest)


def check(store: CheckpointStore, *steps: int) -> int:
    """All that counts is whole; returns the newest, one of `steps`."""
    found = store.manifests()
    for manifest in found:
        for shard in range(SHARDS):
            tensors, _ = store.read_part(manifest, shard)
            assert all(torch.equal(tensors[name], value) for name, value in values(manifest.step, shard).items())
    assert found[0].step in steps
    return found[0].step


@pytest.mark.timeout(600)
def test_at_each_operation(tmp_path: Path) -> None:
    stores = [opened(tmp_path) for _ in range(SHARDS)]
    for step in range(3):
        checkpoint(stores, step)
    newest, count, killed = 2, 0, True
    while killed:
        count += 1
        step = newest + 1
        killed = die_at(count, lambda step=step: checkpoint(stores, step))  # type: ignore[misc]
        newest = check(opened(tmp_path), newest, step)
    assert (newest, count > 20) == (step, True)
    checkpoint([opened(tmp_path) for _ in range(SHARDS)], step + 1)
    assert check(opened(tmp_path), step + 1) == step + 1
    left = [path.name for path in (tmp_path / "checkpoints").rglob(".*")]
    assert not left, "nothing that was left stays"
