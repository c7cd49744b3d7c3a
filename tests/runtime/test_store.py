"""A checkpoint exists wholly or not at all; what is damaged is passed over, and what is needed is never deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from graphft.disk.sealed_json import seal
from graphft.runtime.checkpoint.manifest import Manifest, directory_name
from graphft.runtime.checkpoint.store import CheckpointStore
from graphft.runtime.checkpoint.versioned_store import DamagedCheckpoint, StorageUnavailable
from graphft.runtime.fs import LocalFS

SHARDS = 2


def values(step: int, shard: int) -> dict[str, torch.Tensor]:
    return {
        "w": torch.full((3, 2), float(step)),
        "n": torch.tensor(step * 10 + shard),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "none": torch.empty(0),
    }


def write(store: CheckpointStore, step: int, generation: int = 0, meta: dict[str, int] | None = None) -> Manifest:
    parts = tuple(store.write_part(generation, step, s, SHARDS, values(step, s), f"ledger {s}") for s in range(SHARDS))
    manifest = Manifest(generation, step, "program", parts, meta or {})
    store.write_manifest(manifest)
    return manifest


def steps(store: CheckpointStore) -> list[int]:
    return [m.step for m in store.manifests()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture(params=["in a folder", "in a storage"])
def store(place: Path, tmp_path: Path, request: pytest.FixtureRequest) -> CheckpointStore:
    if request.param == "in a folder":
        return CheckpointStore(place)
    (tmp_path / "job.json").touch()
    return CheckpointStore(place, None, LocalFS(), f"file://{place}", str(place.parent))


def test_round_trip(store: CheckpointStore, place: Path) -> None:
    written = write(store, 50, generation=2, meta={"pass": 1})
    assert store.read_manifest(written.directory) == written
    for shard in range(SHARDS):
        tensors, ledger = store.read_part(written, shard)
        assert ledger == f"ledger {shard}"
        wanted = values(50, shard)
        assert tensors.keys() == wanted.keys()
        for name, value in wanted.items():
            assert tensors[name].dtype == value.dtype
            assert torch.equal(tensors[name], value)
    assert sorted(p.name for p in place.iterdir()) == ["step-00000050.g2"]
    assert [p.name.split(".")[0] for p in sorted((place / "step-00000050.g2").iterdir())] == [
        "manifest",
        "shard-0-of-2",
        "shard-1-of-2",
    ]


def test_newest_is_by_step_then_generation(store: CheckpointStore) -> None:
    for step, generation in ((50, 3), (100, 1), (100, 2), (9, 0)):
        write(store, step, generation)
    assert [(m.step, m.generation) for m in store.manifests()] == [(100, 2), (100, 1), (50, 3), (9, 0)]
    assert store.latest_generation() == 3


# -- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b'{"generation": 0, "step": 100, "program": "", "parts": [1], "meta": {}}']
)
def test_damaged_manifest_is_passed_over(store: CheckpointStore, place: Path, content: bytes) -> None:
    write(store, 50)
    newest = write(store, 100)
    (place / newest.directory / "manifest.json").write_bytes(content)
    assert steps(store) == [50]
    with pytest.raises(DamagedCheckpoint):
        store.read_manifest(newest.directory)


def test_missing_or_truncated_part_is_passed_over(store: CheckpointStore, place: Path) -> None:
    write(store, 50)
    truncated, missing = write(store, 100), write(store, 150)
    os.truncate(place / truncated.parts[1].file, 20)
    (place / missing.parts[0].file).unlink()
    assert steps(store) == [50]
    with pytest.raises(DamagedCheckpoint):
        store.read_manifest(missing.directory)
    with pytest.raises(DamagedCheckpoint):
        store.read_manifest(truncated.directory)
    with pytest.raises(DamagedCheckpoint):
        store.read_part(truncated, 1)
    with pytest.raises(DamagedCheckpoint):
        store.read_part(missing, 0)


# -- pruning ----------------------------------------------------------------------------------------------------


def test_prune_never_deletes_the_last_good_nor_anything_newer(store: CheckpointStore, place: Path) -> None:
    good, newer = write(store, 100), write(store, 150)
    write(store, 50)
    store.write_part(0, 200, 0, SHARDS, values(200, 0))  # being written
    store.write_part(3, 75, 0, SHARDS, values(75, 0))  # so is this one, after everyone went back to step 50
    store.prune(1, good)
    assert steps(store) == [150, 100]
    assert newer in store.manifests()
    assert {p.name for p in place.iterdir()} == {
        directory_name(0, 100),
        directory_name(0, 150),
        directory_name(0, 200),
        directory_name(3, 75),
    }


def test_prune_counts_only_what_can_be_used(store: CheckpointStore, place: Path) -> None:
    write(store, 50)
    damaged, last = write(store, 100), write(store, 150)
    os.truncate(place / damaged.parts[0].file, 3)
    store.prune(2, last)
    assert steps(store) == [150, 50]


def test_prune_removes_what_crashes_left(store: CheckpointStore, place: Path) -> None:
    store.write_part(0, 50, 0, SHARDS, values(50, 0))
    (place / directory_name(0, 50) / ".shard-1-of-2.safetensors.ab.tmp").write_bytes(b"half")
    (place / "notes").mkdir()
    store.prune(3, write(store, 100, generation=1))
    assert sorted(p.name for p in place.iterdir()) == ["notes", directory_name(1, 100)]


def test_two_processes_never_write_under_one_name(store: CheckpointStore, place: Path) -> None:
    mine, other = (each.write_part(0, 2, 0, 1, values(2, 0)) for each in (store, CheckpointStore(place)))
    assert other.file != mine.file
    assert (other.bytes, other.checksum) == (mine.bytes, mine.checksum)


def test_a_whole_file_of_another_checkpoint_is_found(store: CheckpointStore, place: Path) -> None:
    older, newer = write(store, 50), write(store, 60)
    os.replace(place / older.parts[0].file, place / newer.parts[0].file)
    with pytest.raises(DamagedCheckpoint):
        store.read_part(store.read_manifest(newer.directory), 0)


def test_parts_of_an_async_job_as_a_whole_see_it_names_them(place: Path) -> None:
    part = CheckpointStore(place, 0).write_part(0, 2, 0, 1, values(2, 0))
    store, whole = CheckpointStore(place), Manifest(0, 9, "program", (part,))
    store.write_manifest(whole)
    assert torch.equal(store.read_part(store.read_manifest(whole.directory), 0)[0]["w"], values(2, 0)["w"])


def test_a_manifest_that_names_files_elsewhere_is_refused(store: CheckpointStore, place: Path) -> None:
    write(store, 40)
    manifest = write(store, 50)
    path = place / manifest.directory / "manifest.json"
    text = path.read_text()
    for name in ("../../shard-0-of-2.safetensors", "/etc/passwd"):
        path.write_bytes(seal(json.loads(text.replace(manifest.parts[0].file, name))["content"]))
        with pytest.raises(DamagedCheckpoint):
            store.read_manifest(manifest.directory)


def test_a_storage_that_is_away_is_no_empty_one(place: Path, tmp_path: Path) -> None:
    (tmp_path / "job.json").touch()
    copied = CheckpointStore(place, None, LocalFS(), f"file://{place}", str(tmp_path))
    manifest = write(copied, 3)
    (tmp_path / "job.json").rename(tmp_path / "away")
    place.rename(tmp_path / "checkpoints away")
    for ask in (copied.manifests, lambda: copied.read_manifest(manifest.directory)):
        with pytest.raises(StorageUnavailable):
            ask()
    (tmp_path / "away").rename(tmp_path / "job.json")
    assert not copied.manifests(), "the job's record is there: it has no checkpoint"
    (tmp_path / "checkpoints away").rename(place)
    assert steps(copied) == [3]
