"""What a validation's entries leave behind when the process that concluded it is killed before it deletes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphft.runtime.coordination.job_storage import ENTRIES, MARKER, delete_entries
from graphft.runtime.coordination.records import Validating
from graphft.runtime.validation.results import Entries


@pytest.mark.parametrize("stored", [False, True])
def test_a_complete_job_has_none(tmp_path: Path, stored: bool) -> None:
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
