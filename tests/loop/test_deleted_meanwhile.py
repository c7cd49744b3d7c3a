"""A loop saves, with its retention, between any two file operations of another process that reads or prunes there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphft import LocalFS, TrainStatus
from graphft.runtime.loop.check_points import CheckPoints

pytestmark = pytest.mark.timeout(600)
SAVES = 2
LOOKS = ("ls_dir", "size", "open", "delete")


class Loop:
    def __init__(self, path: Path, keep: int) -> None:
        self.model, self.step = nn.Linear(4, 4), 0
        self.points = CheckPoints(path, keep=keep)

    def save(self) -> None:
        self.step += 1
        with torch.no_grad():
            self.model.weight += 1
        self.points.save({"model": self.model}, TrainStatus(0, step=self.step))

    def loads(self) -> None:
        found = nn.Linear(4, 4)
        status = CheckPoints(self.points.path).load({"model": found})
        assert status is not None
        assert status.step == self.step
        assert torch.equal(found.weight, self.model.weight)


class Interrupted(LocalFS):
    """Before its operation of that number, something else happens."""

    def __init__(self, at: int, meanwhile: Callable[[], None]) -> None:
        self.at, self.meanwhile, self.count = at, meanwhile, 0

    def __getattribute__(self, name: str) -> Any:
        if name in LOOKS:
            self.count += 1
            if self.count == self.at:
                self.meanwhile()
        return super().__getattribute__(name)


def test_load_beside_a_loop_finds_the_newest(tmp_path: Path) -> None:
    at, done = 1, False
    while not done:
        loop = Loop(tmp_path / f"at-{at}", keep=1)
        for _ in range(4):
            loop.save()
        fs = Interrupted(at, lambda loop=loop: [loop.save() for _ in range(SAVES)])  # type: ignore[misc]
        before = loop.step
        status = CheckPoints(loop.points.path, fs).load({"model": nn.Linear(4, 4)})
        assert status is not None
        assert status.step >= before
        loop.loads()
        loop.save()
        loop.loads()
        done, at = fs.count < at, at + 1
    assert at > 5
