"""Discarded records are told by their numbers."""

from __future__ import annotations

from pathlib import Path

import graphft
from graphft.runtime.coordination.result_files import describe_discarded, discarded_of
from graphft.runtime.protocol.chunk_queue import Discard, Discards
from tests.support.programs_by_hand import linear


def test_records_of_two_files_are_two(tmp_path: Path) -> None:
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text("a,b,y\n" + "1,2,3\n" * 20)
    paths = [str(tmp_path / "one.csv"), str(tmp_path / "two.csv")]
    data = graphft.files(paths, "csv", {"x": ["a", "b"], "y": ["y"]}, chunk_size=10)
    job = graphft.transpile(linear(2), data=data, batch_size=5)
    third = Discards((Discard(0, 0, "ValueError", records=(3,)),))
    found = discarded_of(job.config, {0: third, 2: third})
    assert [one.records for one in found] == [(3,), (23,)]
    assert describe_discarded(found, 40).startswith("2 of 40 records were DISCARDED, as their batches failed: 3, 23;")
