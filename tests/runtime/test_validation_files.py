"""Files of validations: the best model of a run, whoever is slow, killed or elsewhere; entries until they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphft.disk.tensor_file import read_tensors
from graphft.runtime.coordination.job_files import ENTRIES, MARKER, delete_entries
from graphft.runtime.coordination.records import Validating
from graphft.runtime.validation.best_model import BestModels, Kept
from graphft.runtime.validation.results import Entries


def models(folder: Path, storage: Path | None = None) -> BestModels:
    folder.mkdir(exist_ok=True)
    if storage is not None:
        (folder / "storage.json").write_text(json.dumps({"url": f"file://{storage}"}))
    return BestModels(folder, "max")


def write(to: BestModels, step: int, value: float) -> Kept:
    kept = Kept(step, value)
    to.write(kept, {"w": torch.full((3,), value)})
    return kept


def held(by: BestModels) -> tuple[int, float]:
    kept = by.best()
    assert kept is not None
    file = by.fetch(kept)
    assert file is not None
    return kept.step, float(read_tensors(file)[0]["w"][0])


@pytest.mark.parametrize("stored", [False, True])
def test_a_slow_process_deletes_no_better_one(tmp_path: Path, stored: bool) -> None:
    found = models(tmp_path / "job", tmp_path / "storage" if stored else None)
    old, new = write(found, 26, 0.5), write(found, 39, 0.75)
    found.forget_worse(new)
    assert held(found) == (39, 0.75)
    write(found, 26, 0.5)  # it had been about to
    found.forget_worse(old)
    assert held(found) == (39, 0.75)
    found.forget_worse(new)
    place = tmp_path / ("storage" if stored else "job") / "best"
    assert [p.name for p in sorted(place.iterdir())] == ["step-00000039.json", "step-00000039.safetensors"]


def test_the_first_of_equal_ones_is_the_best(tmp_path: Path) -> None:
    found = models(tmp_path / "job")
    first = write(found, 10, 0.5)
    write(found, 20, 0.5)
    assert held(found) == (10, 0.5)
    found.forget_worse(first)
    assert found.best(before=10) is None


def test_a_killed_write_is_none(tmp_path: Path) -> None:
    found = models(tmp_path / "job")
    write(found, 10, 0.5)
    (tmp_path / "job/best/step-00000020.safetensors").write_bytes(b"half")
    (tmp_path / "job/best/step-00000030.json").write_text('{"step": 3')
    assert held(found) == (10, 0.5)


def test_a_note_with_a_flipped_bit_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = models(tmp_path / "job")
    write(found, 10, 0.5)
    write(found, 20, 0.75)
    note = tmp_path / "job/best/step-00000020.json"
    note.write_bytes(note.read_bytes().replace(b"0.75", b"0.35"))
    assert held(found) == (10, 0.5)
    assert "step-00000020.json is damaged, and the model beside it does not count" in caplog.text


def test_another_machine_finds_it_in_the_storage_and_another_folder_takes_it_along(tmp_path: Path) -> None:
    write(models(tmp_path / "job", tmp_path / "storage"), 10, 0.5)
    other = models(tmp_path / "elsewhere", tmp_path / "storage")
    assert other.has(Kept(10, 0.5))
    assert not other.has(Kept(20, 0.5))
    assert not list(other.files.folder.glob("*.safetensors")), "who asks whether it is there fetches nothing"
    assert held(other) == (10, 0.5)
    next_run = models(tmp_path / "next")
    next_run.adopt(other)
    assert held(next_run) == (10, 0.5)
    models(tmp_path / "empty").adopt(models(tmp_path / "nothing"))
    (tmp_path / "next/best/step-00000010.safetensors").unlink()
    with pytest.raises(OSError, match="the model of step 10, the best one, is gone"):
        models(tmp_path / "last").adopt(next_run)


@pytest.mark.parametrize("stored", [False, True])
def test_a_complete_job_has_no_entries(tmp_path: Path, stored: bool) -> None:
    job_dir, storage = tmp_path / "job", tmp_path / "storage"
    job_dir.mkdir()
    if stored:
        (job_dir / MARKER).write_text(json.dumps({"url": storage.as_uri()}))
    for step in (5, 10):
        entries = Entries(job_dir, step, Validating(2, f"step-{step}"))
        entries.write(0, {"scores": [torch.ones(3)]})
        assert entries.read(1)["scores"].tolist() == [1.0] * 3
    assert (storage / ENTRIES).exists() == stored
    delete_entries(job_dir)
    delete_entries(job_dir)
    assert not (job_dir / ENTRIES).exists()
    assert not (storage / ENTRIES).exists()
