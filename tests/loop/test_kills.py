"""A process that is killed at any operation of a save, on the disk or on a store, leaves a version that loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import graphft
from graphft import TrainStatus
from graphft.runtime.fs import FsspecFS
from graphft.runtime.loop.check_points import CheckPoints

pytestmark = pytest.mark.timeout(600)


class Values:
    """A state that tells which save it is of."""

    def __init__(self, number: int) -> None:
        self.tensor = torch.full((1000,), float(number))

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def save(path: str, number: int, **options: Any) -> None:
    graphft.save_check_point(Values(number), TrainStatus(number), path, keep=2, **options)


def loaded(path: str, **options: Any) -> int:
    values = Values(-1)
    status = graphft.load_check_point(values, path, **options)
    assert status is not None
    assert torch.equal(values.tensor, torch.full((1000,), float(status.epoch_no)))
    return status.epoch_no


class KilledError(BaseException):
    """The process ends here."""


class Lethal(FsspecFS):
    """A store whose user dies before one operation, or (`after`) when it was done, before the answer is there."""

    def __init__(self, fs: Any, at: int, after: bool) -> None:
        super().__init__(fs)
        self.left, self.after = at, after

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("mkdir", "create", "delete", "ls_dir", "size", "open", "writing"):
            return found

        def called(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise KilledError
            answer = found(*arguments, **options)
            if self.left == 0:
                raise KilledError
            return answer

        return called


@pytest.mark.parametrize("after", [False, True])
def test_on_a_store(tmp_path: Path, after: bool) -> None:
    path, memory = f"{tmp_path}/{after}", fsspec.filesystem("memory")
    sound = FsspecFS(memory)
    save(path, 0, fs=sound)
    count = 0
    while True:
        count += 1
        try:
            CheckPoints(path, Lethal(memory, count, after)).save({"state": Values(count)}, TrainStatus(count))
            break
        except KilledError:
            assert loaded(path, fs=sound) in (0, count)
            save(path, 0, fs=sound)
    assert count >= 5
    assert loaded(path, fs=sound) == count


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    left, write = [0], os.write

    def fails(*arguments: Any) -> int:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "write", fails)
    yield left
    left[0] = 0


def test_what_the_storage_refuses_is_tried_again(tmp_path: Path, failing: list[int]) -> None:
    pauses: list[float] = []
    place = CheckPoints(str(tmp_path), sleep=pauses.append)
    failing[0] = 3
    saving = place.begin({"state": Values(0)}, TrainStatus(0))
    assert saving.result(120) == 3, "each try has a version of its own"
    assert pauses == [0.5, 1.0, 2.0]
    failing[0] = 1000
    saving = place.begin({"state": Values(1)}, TrainStatus(1))
    with pytest.raises(OSError, match="No space left"):
        saving.result(120)
    failing[0] = 0
    assert loaded(str(tmp_path)) == 0, "the one before it is still there"
    assert place.save({"state": Values(2)}, TrainStatus(2)) > 3
    assert loaded(str(tmp_path)) == 2
