"""A curve of a few hundred points, read from files that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphft.runtime.page import curve as module
from graphft.runtime.page.curve import BUCKETS, Curve, MetricFiles


def row(step: int, loss: float = 1.0, **more: Any) -> bytes:
    return json.dumps({"step": step, "slot": 0, "loss": loss, "samples": 4, "at": float(step), **more}).encode() + b"\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "metrics").mkdir()
    return tmp_path / "metrics" / "trainer-0-a.jsonl"


def test_files_are_read_on_from_where_they_were_read_to(tmp_path: Path, file: Path) -> None:
    curve, files = Curve(), MetricFiles(tmp_path)
    file.write_bytes(row(0, 2.0) + row(1, 1.5)[:9])
    files.read(curve)
    assert curve.to_json()["series"] == {"loss": [2.0]}
    with file.open("ab") as f:
        f.write(row(1, 1.5)[9:] + row(2, 1.0, metrics={"accuracy": 0.5}))
    file.with_name("trainer-1-b.jsonl").write_bytes(row(1, 2.5))
    files.read(curve)
    files.read(curve)
    told = curve.to_json()
    assert told["steps"] == [0, 1, 2]
    assert told["series"] == {"loss": [2.0, 2.0, 1.0], "accuracy": [None, None, 0.5]}


def test_a_large_file_is_read_a_part_at_a_time(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_BYTES", 1000)
    file.write_bytes(b"".join(row(step) for step in range(100)))
    curve, files, steps = Curve(), MetricFiles(tmp_path), []
    for _ in range(20):
        files.read(curve)
        steps.append(len(curve.to_json()["steps"]))
    assert steps[0] < 20
    assert files.behind == 0
    assert steps[-1] == 100


def test_it_stays_small_and_true(tmp_path: Path) -> None:
    """However many steps there are: the mean over all is that of the rows, by their samples."""
    curve = Curve()
    for step in range(100_000):
        curve.add(step, 1 + step % 3, {"loss": float(step)}, float(step))
    told = curve.to_json()
    assert BUCKETS / 2 < len(told["steps"]) <= BUCKETS
    assert told["width"] == 256
    assert told["series"]["loss"][0] == pytest.approx(255 / 2, rel=0.01)
    assert told["steps"][-1] == 100_000 // 256 * 256


def test_lines_that_are_no_rows_and_values_that_are_no_numbers(tmp_path: Path, file: Path) -> None:
    bad = [b"{", b"7", b"[]", b"null", b'{"step": 1}', b'{"step": "x", "loss": 1}', b"\xff\xfe", b"[" * 10_000]
    wild = [row(3, float("nan")), row(3, float("inf")), row(3, 4.0, metrics={"f1": float("nan")})]
    file.write_bytes(b"\n".join(bad) + b"\n" + b"".join(wild) + row(4))
    (file.parent / "folder.jsonl").mkdir()
    curve = Curve()
    MetricFiles(tmp_path).read(curve)
    told = curve.to_json()
    assert told["series"] == {"loss": [4.0, 1.0]}
    assert told["nonfinite"] == 3


def test_the_step_at_a_time() -> None:
    curve = Curve()
    for step in range(10):
        curve.add(step, 1, {"loss": 1.0}, 100.0 + step)
    curve.add(4, 1, {"loss": 1.0}, 120.0)  # computed again
    assert curve.step_at(99.0) is None
    assert curve.step_at(104.5) == 4
    assert curve.step_at(1e9) == 9
