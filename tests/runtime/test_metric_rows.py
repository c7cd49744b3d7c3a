"""What trainers note of each batch: as few bytes as hold it, whole after a kill, and bounded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from graphft.runtime.process.metric_files import LEVELS, file_of, files_of, losses_of, metrics_of, read_file, read_table
from graphft.runtime.process.metric_rows import RowFormat
from graphft.runtime.roles.trainer.metrics import BLOCK, FILES, Metrics
from graphft.sealed_json import seal
from tests.support.waiting import until

F32 = float(np.float32(0.1))


def writer(folder: Path, trainer: str = "0-a", limit: int = 0, *, told: list[str] | None = None) -> Metrics:
    def lost(count: int, what: str) -> None:
        raise AssertionError(what)

    return Metrics(folder, trainer, ("loss", "accuracy"), limit, lost, [].append if told is None else told.append)


def disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "metrics").iterdir())


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    metrics = writer(tmp_path)
    metrics.write(7, 3, 128, 1785000000.25, (F32, 1.0))
    table = read_table(tmp_path)
    found = [column.tolist() for column in (table.step, table.slot, table.samples, table.values["accuracy"])]
    assert found == [[7], [3], [128], [1.0]]
    assert table.at[0] == pytest.approx(1785000000.25, abs=2e-3)
    assert losses_of(tmp_path) == [(7, 3, F32)], "the same bits: replay compares them"
    size = file_of(tmp_path, "0-a", 1, 0).stat().st_size
    metrics.write(8, 3, 128, 1785000001.0, (F32, 1.0))
    assert file_of(tmp_path, "0-a", 1, 0).stat().st_size - size == 24


@pytest.mark.parametrize(
    "second",
    [
        (8, 0, 4, 1.5, (0.1, 1.0)),  # a double
        (8, 0, 4, 1.5, (1e300, 1.0)),
        (1 << 40, 0, 4, 1.5, (0.5, 1.0)),
        (8, 0, 4, 1e7, (0.5, 1.0)),
        (8, 0, 4, 0.5, (0.5, 1.0)),  # a clock that was set back
    ],
)
def test_what_does_not_fit_begins_another_file(
    tmp_path: Path, second: tuple[int, int, int, float, tuple[float, float]]
) -> None:
    metrics = writer(tmp_path)
    metrics.write(7, 0, 4, 1.0, (F32, 1.0))
    metrics.write(*second)
    step, loss = second[0], second[4][0]
    metrics.write(step + 1, 0, 4, second[3] + 1, (0.25, 1.0))
    assert losses_of(tmp_path) == [(7, 0, F32), (step, 0, loss), (step + 1, 0, 0.25)]
    assert len(files_of(tmp_path, 1)) == 2


def test_what_is_not_finite_is_kept(tmp_path: Path) -> None:
    metrics = writer(tmp_path)
    for step, loss in enumerate((float("nan"), float("inf"), float("-inf"))):
        metrics.write(step, 0, 4, 1.0, (loss, 0.5))
    assert str(losses_of(tmp_path)) == "[(0, 0, nan), (1, 0, inf), (2, 0, -inf)]"


def test_a_row_that_does_not_fit_at_all_is_lost_and_told(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    metrics = Metrics(tmp_path, "0-a", ("loss",), 0, lambda *found: told.append(found), told.append)
    metrics.write(1, 1 << 16, 4, 1.0, (0.5,))
    metrics.write(2, 0, 4, 1.0, (0.5,))
    metrics.close()
    assert losses_of(tmp_path) == [(2, 0, 0.5)]
    names = ("loss", *(f"{i:0300}" for i in range(4000)))
    Metrics(tmp_path, "0-b", names, 0, lambda *found: told.append(found), told.append).write(1, 0, 4, 1.0, [0.5] * 4001)
    assert "the names of 4001 values take more than" in told.pop()[1]
    ((count, what),) = told
    assert (count, "slot 65536 with 4 samples does not fit into a row" in what) == (1, True)


def test_damage_is_discarded(tmp_path: Path) -> None:
    """A crash of the machine leaves zeros; a disk flips bits; a kill cuts a row off."""
    metrics = writer(tmp_path)
    for step in range(4):
        metrics.write(step, 0, 4, 1.0, (0.5, 1.0))
    path = file_of(tmp_path, "0-a", 1, 0)
    data = bytearray(path.read_bytes())
    data[-24 - 5] ^= 1  # in step 2
    path.write_bytes(data + bytes(24 * 3) + data[-24:-7])
    file_of(tmp_path, "0-a", 16, 0).unlink()
    file_of(tmp_path, "0-a", 256, 0).unlink()
    assert [step for step, _, _ in losses_of(tmp_path)] == [0, 1, 3]
    header = data.index(b"\n") + 1
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(header)]
    for first in (b"", b"{", seal({"rows": 2}), b"[]\n", b"\xff\n", data[:20], b"[" * 100_000 + b"\n", *flipped):
        path.write_bytes(first)
        assert losses_of(tmp_path) == []
        assert metrics_of(tmp_path) == {}


def test_a_file_that_grows_is_read_on_from_where_it_was_left(tmp_path: Path) -> None:
    """Also while a row is written: half of it is nothing so far."""
    (tmp_path / "metrics").mkdir()
    format = RowFormat(("loss",), False, 10, 1.0)
    rows = [format.pack(step, 0, 4, 2.0, (0.5,)) or b"" for step in (10, 11, 12)]
    lines = [json.dumps({"step": step, "slot": 0, "loss": 0.5}).encode() + b"\n" for step in (10, 11, 12)]
    for path, pieces in (
        (file_of(tmp_path, "0-a", 1, 0), [format.header[:9], format.header[9:] + rows[0], rows[1] + rows[2][:5]]),
        (tmp_path / "metrics" / "trainer-1-b.jsonl", [lines[0][:9], lines[0][9:], lines[1] + lines[2][:5]]),
    ):
        rest, found, offset = (rows if path.suffix == ".rows" else lines)[2][5:], [], 0
        for piece in (*pieces, rest, b""):
            with path.open("ab") as file:
                file.write(piece)
            seen = list(read_file(path, offset))
            found.append([step for table, _ in seen for step in table.step.tolist()])
            offset = seen[-1][1] if seen else offset
        assert found == [[], [10], [11], [12], []]
    assert [*read_file(tmp_path / "metrics" / "gone.rows")] == []


def test_old_steps_are_thinned_out_within_the_limit(tmp_path: Path) -> None:
    limit, told = 64 * BLOCK, list[str]()
    metrics = writer(tmp_path, limit=limit, told=told)
    last = 100_000
    for step in range(last):
        metrics.write(step, 0, 4, float(step // 8), (0.5, 1.0))
    assert limit / 2 < disk(tmp_path) <= limit + len(LEVELS) * (limit // FILES + 100)
    steps = read_table(tmp_path).step
    gaps = np.diff(steps)
    assert (np.diff(gaps) <= 0).all(), "older steps have fewer rows"
    assert [gaps[0], gaps[-5000:].max()] == [256, 1]
    assert np.count_nonzero(gaps == 16) > 2000
    assert steps[-1] == last - 1
    folder = tmp_path / "metrics"
    assert told == [
        f"{folder} takes its 0 MB (metrics_limit): of the oldest steps only each 16th is kept",
        f"{folder} takes its 0 MB (metrics_limit): of the oldest steps only each 256th is kept",
    ]


def test_trainers_share_the_limit_and_what_dead_ones_left_counts(tmp_path: Path) -> None:
    limit = 64 * BLOCK
    for life in range(100):  # each leaves a small file
        metrics = writer(tmp_path, f"0-{life}", limit)
        metrics.write(life, 0, 4, float(life), (0.5, 1.0))
        metrics.close()
        os.utime(file_of(tmp_path, f"0-{life}", 1, 0), (1e9 - life, 1e9 - life))  # a clock that is set back
    found = files_of(tmp_path, 1)
    assert len(found) <= 33, "a file takes a block of the disk"
    assert file_of(tmp_path, "0-99", 1, 0) in found
    (tmp_path / "metrics" / "trainer-0-old.jsonl").write_text('{"step": 0, "slot": 0, "loss": 0.5}\n')
    one, other = writer(tmp_path, "1-a", limit), writer(tmp_path, "2-b", limit)
    one.write(1000, 0, 4, 1.0, (0.5, 1.0))
    for step in range(1001, 20_000):
        other.write(step, 1, 4, 2.0, (0.5, 1.0))
    assert not file_of(tmp_path, "1-a", 1, 0).exists(), "it was the oldest"
    one.write(20_000, 0, 4, 3.0, (0.5, 1.0))
    assert (20_000, 0, 0.5) in losses_of(tmp_path), "it goes on in another file"
    assert (0, 0, 0.5) in losses_of(tmp_path), "JSON lines of an older graphft stay"


WRITES = """
import sys
from pathlib import Path
from graphft.runtime.roles.trainer.metrics import Metrics
metrics = Metrics(Path(sys.argv[1]), sys.argv[2], ("loss", "accuracy"), 1 << 20, print, lambda what: None)
step = 0
while True:
    metrics.write(step, 0, 4, step / 1000, (step % 1024 / 1024, 0.5))
    step += 1
"""


def test_whenever_it_is_killed_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """Rows, new files and deletions follow each other all the time; two write, and one reads meanwhile."""
    for life in range(4):
        names = [f"{index}-{life}" for index in (0, 1)]
        command = [sys.executable, "-c", WRITES, str(tmp_path)]
        processes = [subprocess.Popen([*command, name]) for name in names]
        try:
            until(lambda names=names: all(any(name in p.name for p in files_of(tmp_path, 1)) for name in names))
            for _ in range(10 * (life + 1)):
                table = read_table(tmp_path)
                assert (table.values["loss"] == table.step % 1024 / 1024).all()
            until(lambda: len(read_table(tmp_path)) > 1000)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
                process.wait()
    table = read_table(tmp_path)
    assert len(table) > 1000
    assert (table.values["loss"] == table.step % 1024 / 1024).all()
    assert disk(tmp_path) <= (1 << 20) + 8 * (1 << 20) // FILES
