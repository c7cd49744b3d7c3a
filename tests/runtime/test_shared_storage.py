"""Two jobs that were given one storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphft.runtime.launcher.job_folder import open_folder
from tests.integration import training


def test_the_second_one_is_told_whose_the_storage_is_and_what_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the URL that the script names would take the other job's model for its own."""
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/storage/one"
    first = training.job(training.program(), storage=url, name="first")
    assert open_folder(first).describe(first.config) == f"new run in jobs/first, storage {url}"
    second = training.job(training.program(), storage=url, name="second", batch_size=4)
    told = open_folder(second).describe(second.config)
    assert told.startswith(f"{url} holds job first, which differs in: "), told
    assert told.endswith(f"; new run in jobs/second-2, storage {url}-2"), told
    assert sorted(path.name for path in Path("jobs").iterdir()) == ["first", "second-2"], "no copy of the other job"
