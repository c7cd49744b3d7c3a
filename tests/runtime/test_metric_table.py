"""The table of a run's metrics has each step once, however its writers end; what is read of it is means by samples."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

import graphft
from graphft.runtime.coordination.job_files import (
    fetch,
    fetch_metrics,
    fetch_result,
    publish,
    publish_result,
    put_metrics,
)
from graphft.runtime.coordination.result_files import describe_discarded, discarded_of, epoch_of_table
from graphft.runtime.process.metric_table import FILE, TableWriter, read_rows
from graphft.runtime.protocol.chunk_queue import Discard, Discards
from graphft.transpiler.config import JobConfig
from graphft.transpiler.job import Job
from tests.support.metric_rows import write_rows
from tests.support.programs_by_hand import linear


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(step, values["loss"]) for step, values in read_rows(folder).steps()]


def test_rows_have_all_their_digits(tmp_path: Path) -> None:
    write_rows(tmp_path, [0.1 + 0.2, math.inf], accuracy=1 / 3)
    assert list(read_rows(tmp_path).steps()) == [
        (0, {"loss": 0.1 + 0.2, "accuracy": 1 / 3}),
        (1, {"loss": math.inf, "accuracy": 1 / 3}),
    ]
    assert [step for step, _ in read_rows(tmp_path, 1).steps()] == [1]
    assert len(read_rows(tmp_path, 0, 1)) == 1
    assert len(read_rows(tmp_path, 7)) == 0
    assert len(read_rows(tmp_path / "elsewhere")) == 0


def test_who_goes_back_writes_the_rows_anew(tmp_path: Path) -> None:
    table = TableWriter(tmp_path, ("loss",), 0)
    for step in range(4):
        table.append(step, 4, (float(step),))
    table.cut(2)
    table.append(2, 4, (9.0,))
    assert losses(tmp_path) == [(0, 0.0), (1, 1.0), (2, 9.0)]


def test_of_a_process_that_was_taken_for_dead_nothing_comes(tmp_path: Path) -> None:
    old = TableWriter(tmp_path, ("loss",), 0)
    for step in range(3):
        old.append(step, 4, (float(step),))
    new = TableWriter(tmp_path, ("loss",), 2)
    old.append(3, 4, (7.0,))
    new.append(2, 4, (5.0,))
    old.append(4, 4, (7.0,))
    assert losses(tmp_path) == [(0, 0.0), (1, 1.0), (2, 5.0)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_row_is_written_again(tmp_path: Path, cut: int) -> None:
    write_rows(tmp_path, [0.5, 0.25, 0.125])
    size = (tmp_path / FILE).stat().st_size
    os.truncate(tmp_path / FILE, size - cut)
    whole = len(read_rows(tmp_path))
    assert whole == 2 - (cut - 1) // 32
    write_rows(tmp_path, [1.0] * (3 - whole), whole)
    assert [step for step, _ in losses(tmp_path)] == [0, 1, 2]
    assert (tmp_path / FILE).stat().st_size == size


def test_rows_wait_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, write, left = TableWriter(tmp_path, ("loss",), 0), os.write, [40]

    def full(file: int, data: bytes) -> int:
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        done = write(file, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(os, "write", full)
    for step in range(3):
        table.append(step, 4, (float(step),))
    assert table.waiting
    assert losses(tmp_path) == [(0, 0.0)]
    table.cut(2)
    left[0] = 1 << 20
    table.append(2, 4, (9.0,))
    assert losses(tmp_path) == [(0, 0.0), (1, 1.0), (2, 9.0)]


def config(**options: object) -> JobConfig:
    """2 epochs of 4 steps."""
    return JobConfig("rows", graphft.arrays(x=torch.zeros(16, 1), chunk_size=8), 4, **{"epochs": 2, **options})  # type: ignore[arg-type]


def test_an_epoch_is_the_mean_over_its_samples(tmp_path: Path) -> None:
    table = TableWriter(tmp_path, ("loss", "f1"), 0)
    for step, (samples, loss, f1) in enumerate([(1, 4.0, 0.5), (3, 8.0, 1.0), (-4, math.nan, 1.0), (0, math.nan, 0.0)]):
        table.append(step, samples, (loss, f1))
    table.append(4, 2, (1.0, math.nan))
    first, second = (epoch_of_table(tmp_path, config(), epoch) for epoch in (0, 1))
    assert (first.samples, first.means, first.lacking) == (4, {"loss": 7.0, "f1": 0.875}, 0), "without discarded steps"
    assert (second.samples, second.means, second.lacking) == (2, {"loss": 1.0, "f1": "nan"}, 3)
    assert [step for step, _ in read_rows(tmp_path).steps()] == [0, 1, 2, 4], "step 3 had no data"


def test_another_machine_goes_on_with_the_rows_in_the_storage(tmp_path: Path, job: Job) -> None:
    url = f"file://{tmp_path}/stored"
    here, there = tmp_path / "here", tmp_path / "there"
    Job.make(job.source, job.config.replace(storage=url)).save(here)
    publish(here)
    fetch(url, there)
    write_rows(here, [0.5, 0.25])
    put_metrics(here)
    fetch_metrics(there)
    assert losses(there) == [(0, 0.5), (1, 0.25)]
    write_rows(there, [1.0, 2.0, 3.0])
    fetch_metrics(there)
    assert len(losses(there)) == 3, "it is not shorter"
    put_metrics(there)
    (there / ".model").write_bytes(b"model")
    publish_result(there, there / ".model")
    fetch_result(here)
    assert losses(here) == [(0, 1.0), (1, 2.0), (2, 3.0)]


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
