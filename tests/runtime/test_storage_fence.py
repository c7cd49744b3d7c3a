"""The newest of launchers that share nothing but a job's storage may write there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphft.errors import UsageError
from graphft.runtime.coordination.job_files import check_launcher, take_storage
from graphft.transpiler.record import MARKER


def test_the_newest_launcher_has_it(tmp_path: Path) -> None:
    place = tmp_path / "storage"
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (place, one, two):
        folder.mkdir()
        (folder / MARKER).write_text(json.dumps({"url": f"file://{place}"}))
    (place / "job.json").touch()
    take_storage(one)
    check_launcher(one)
    take_storage(two)
    check_launcher(two)
    with pytest.raises(UsageError, match="pid"):
        check_launcher(one)
    take_storage(one, shared=True)
    check_launcher(one)  # an etcd that all machines share keeps them apart
    for path in place.iterdir():
        path.unlink()
    with pytest.raises(OSError, match="mounted"):
        check_launcher(two)
    check_launcher(tmp_path)  # no storage: nothing to do
