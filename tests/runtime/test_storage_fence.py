"""Of launchers that share nothing but a job's storage, the newest may write there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphft.runtime.coordination import job_storage
from graphft.runtime.coordination.job_storage import (
    StorageFence,
    check_launcher,
    forget_launcher,
    other_launcher,
    take_storage,
)
from graphft.transpiler.record import MARKER


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    path.mkdir()
    (path / "job.json").touch()
    return path


def machine(place: Path, name: str) -> Path:
    """A copy of the job's folder."""
    folder = place.parent / name
    folder.mkdir(exist_ok=True)
    (folder / MARKER).write_text(json.dumps({"url": f"file://{place}"}))
    return folder


def test_the_newest_launcher_has_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, told = machine(place, "one"), machine(place, "two"), list[str]()
    take_storage(one)
    check_launcher(one)
    fence = StorageFence(one, told.append)
    fence.look()
    take_storage(two)
    check_launcher(two)
    with pytest.raises(OSError, match="pid"):
        check_launcher(one)
    fence.look()
    assert not told, "it looks now and then"
    monkeypatch.setattr(job_storage.time, "monotonic", lambda: 1e12)
    fence.look()
    assert len(told) == 1
    forget_launcher(one)
    check_launcher(one)  # an etcd that all machines share keeps them apart


def test_a_storage_that_is_away_is_nobody_elses(place: Path) -> None:
    """A file system that is not mounted is an empty folder."""
    folder = machine(place, "one")
    take_storage(folder)
    (place / "launcher.json").write_text("{")
    assert "does not name" in other_launcher(folder)
    for path in place.iterdir():
        path.unlink()
    with pytest.raises(OSError, match="mounted"):
        check_launcher(folder)
    check_launcher(place.parent)  # no storage: nothing to do
