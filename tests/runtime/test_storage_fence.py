"""Of launchers that share nothing but a job's storage, the newest may write there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphft.runtime.coordination import job_files
from graphft.runtime.coordination.job_files import StorageFence, check_launcher, take_storage
from graphft.transpiler.record import MARKER


def test_the_newest_launcher_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, told = tmp_path / "storage", list[str]()
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (place, one, two):
        folder.mkdir()
        (folder / MARKER).write_text(json.dumps({"url": f"file://{place}"}))
    (place / "job.json").touch()
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
    monkeypatch.setattr(job_files.time, "monotonic", lambda: 1e12)
    fence.look()
    assert len(told) == 1
    take_storage(one, shared=True)
    check_launcher(one)  # an etcd that all machines share keeps them apart
    for path in place.iterdir():
        path.unlink()
    with pytest.raises(OSError, match="mounted"):
        check_launcher(two)
    check_launcher(tmp_path)  # no storage: nothing to do
