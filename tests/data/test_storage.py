"""Storage that is away: which errors may pass by waiting, how long is waited, and when a chunk is to blame."""

from __future__ import annotations

import http.client
import time
from pathlib import Path

import fsspec.exceptions
import pytest
import torch
from torch import Tensor

from graphft.data import dataset, files
from graphft.errors import GraphftError, UsageError
from graphft.runtime.data import open_reader
from graphft.runtime.data.reader import GOOD_NEIGHBOURS, WAIT_SECONDS, Patience, is_of_storage, neighbours
from graphft.runtime.roles.trainer import batches as storage_wait
from graphft.runtime.roles.trainer.batches import AWAY, open_when_there


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError("f"), True),
        (FileNotFoundError(2, "not there", "/mnt/f"), True),
        (FileNotFoundError(2, "not there", "s3://bucket/f"), True),
        (OSError(5, "input/output error", "data/f"), True),
        (FileNotFoundError(2, "not there", "data/f"), False),
        (caused(GraphftError("x"), NotADirectoryError(20, "no directory", Path("data/f"))), False),
        (PermissionError(13, "denied", "f"), False),
        (ConnectionResetError(), True),
        (fsspec.exceptions.FSTimeoutError(), True),
        (http.client.IncompleteRead(b""), True),
        (caused(GraphftError("x"), PermissionError()), True),
        (caused(ValueError("x"), caused(KeyError("y"), TimeoutError())), True),
        (type("Odd", (Exception,), {"__module__": None})(), False),
        (ValueError("damaged"), False),
        (TypeError(), False),
        (EOFError(), False),
        (GraphftError("x"), False),
    ],
)
def test_which_errors_are_of_storage(error: Exception, expected: bool) -> None:
    assert is_of_storage(error) is expected


def verdicts(neighbours: list[bool | None], every: float) -> list[str]:
    patience = Patience(0.0)
    return [patience.failed(i * every, neighbour) for i, neighbour in enumerate(neighbours)]


def test_an_outage_is_waited_for_and_is_never_the_chunks_fault() -> None:
    assert set(verdicts([False] * 100, 2.9)) == {"wait"}
    assert verdicts([False] * 4, WAIT_SECONDS / 2)[2:] == ["away"] * 2


def test_a_chunk_that_fails_while_its_neighbours_succeed_is_bad() -> None:
    """It is not bad at once: storage may have come back between the two reads."""
    assert verdicts([True] * GOOD_NEIGHBOURS, 1.0) == ["wait"] * (GOOD_NEIGHBOURS - 1) + ["bad"]
    assert verdicts([False, True] * GOOD_NEIGHBOURS, 1.0)[-1] == "bad"


def test_neighbours_are_of_the_same_source() -> None:
    near, far = ["s3://b/x", "s3://b/x", "s3://b/y", "s3://c/x"], ["s3://b/x", "s3://b/y", "s3://c/x"]
    assert list(neighbours(1, near)) == [0]
    assert list(neighbours(0, far)) == [1], "another folder of the same bucket, but no other bucket"
    assert list(neighbours(2, far)) == []
    assert list(neighbours(1, ["", "", ""])) == [2, 0]


def test_probes_of_files(tmp_path: Path) -> None:
    """A chunk that was read before does not hide that storage is away."""
    for name in "ab":
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"y\n1\n2\n3\n4\n")
    spec = files([str(tmp_path / "in" / n) for n in "ab"], "csv", {"y": "y"}, chunk_size=2)
    reader = open_reader(spec, ".", 0)
    for chunk in range(4):
        reader.batch(0, chunk, 0, 2)
    assert [reader.probe(0, n) for n in range(3)] == [True] * 3
    (tmp_path / "in" / "b").unlink()
    assert [reader.probe(0, n) for n in range(3)] == [True, False, False]
    (tmp_path / "in").rename(tmp_path / "away")
    assert [reader.probe(0, n) for n in range(3)] == [False] * 3
    assert open_reader(files(str(tmp_path / "away" / "a"), "csv", {"y": "y"}), ".", 0).probe(0, 0) is None


def test_data_that_is_away_at_the_start_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"y\n1\n2\n")
    spec = files(str(tmp_path / "f"), "csv", {"y": "y"})
    tries, told = [], list[str]()

    def make() -> object:
        tries.append(time.monotonic())
        if len(tries) == 3:
            (tmp_path / "away").rename(tmp_path / "f")
        return open_reader(spec, ".", 0)

    (tmp_path / "f").rename(tmp_path / "away")
    assert open_when_there(make, told.append).spec == spec  # type: ignore[arg-type]
    assert len(tries) == 3
    assert [text.startswith("waiting for storage: ") and str(tmp_path / "f") in text for text in told] == [True]
    (tmp_path / "f").unlink()
    monkeypatch.setattr(storage_wait, "START_SECONDS", 0.5)
    with pytest.raises(GraphftError, match="could not be opened for") as error:
        open_when_there(lambda: open_reader(spec, ".", 0), print)
    assert error.value.rule == AWAY


def squares(path: str) -> list[tuple[Tensor]]:
    return [(torch.tensor(float(line)),) for line in Path(path).read_text().split()]


def test_a_relative_path_in_another_folder_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with 2: it is not started again."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "squares").write_text("1 4 9 16")
    monkeypatch.chdir(tmp_path / "in")
    spec = dataset(squares, {"path": "squares"}, columns=("x",), chunk_size=2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=rf"squares in {tmp_path} failed: .*No such file.*'squares'") as error:
        open_when_there(lambda: open_reader(spec, ".", 0), pytest.fail)
    assert "'path': 'squares'" in error.value.help
