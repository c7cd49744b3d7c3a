"""Saving beside the loop, and beside another process that saves or reads there: the state of the moment, the newest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft import LocalFS, TrainStatus
from graphft.errors import GraphftError
from graphft.runtime.loop.check_points import CheckPoints


class Slow(LocalFS):
    """Files are written when `go` says so."""

    def __init__(self) -> None:
        self.go, self.began = threading.Event(), threading.Event()

    def writing(self, path: str) -> Any:
        self.began.set()
        assert self.go.wait(120)
        return super().writing(path)


def test_what_is_saved_is_the_state_of_that_moment(tmp_path: Path) -> None:
    fs, model = Slow(), nn.Linear(4, 4)
    before = model.weight.detach().clone()
    saving = CheckPoints(str(tmp_path), fs).begin(model, TrainStatus(0))
    with torch.no_grad():
        model.weight += 5  # in place, while it is being saved
    assert not saving.done()
    fs.go.set()
    assert saving.result(120) == 0
    found = graphft.read_check_point(str(tmp_path))
    assert found is not None
    assert torch.equal(found.states["state"]["weight"], before)


def test_one_is_at_work_and_of_those_that_wait_the_newest_is_saved(tmp_path: Path) -> None:
    fs, model = Slow(), nn.Linear(4, 4)
    place = CheckPoints(str(tmp_path), fs)
    first = place.begin({"w": model}, TrainStatus(0))
    assert fs.began.wait(120)
    waiting = [place.begin({"w": model}, TrainStatus(n)) for n in (1, 2, 3)]
    assert [w.done() for w in waiting] == [True, True, False]
    fs.go.set()
    assert [w.result(120) for w in (first, *waiting)] == [0, None, None, 1]
    found = place.newest()
    assert found is not None
    assert found.status == TrainStatus(3)


def test_of_two_loops_on_one_path_the_older_is_told(tmp_path: Path) -> None:
    one, other = CheckPoints(str(tmp_path)), CheckPoints(str(tmp_path))
    one.save(nn.Linear(4, 4), TrainStatus(0, step=1000))
    other.load(nn.Linear(4, 4))
    one.save(nn.Linear(4, 4), TrainStatus(0, step=1001))
    with pytest.raises(GraphftError, match="has saved version 1 meanwhile; the newest that this process knows is 0"):
        other.save(nn.Linear(4, 4), TrainStatus(0, step=3))
    newcomer = CheckPoints(str(tmp_path))
    newcomer.save(nn.Linear(4, 4), TrainStatus(0, step=0))  # begins anew
    with pytest.raises(GraphftError, match="has saved version 2 meanwhile"):
        one.begin(nn.Linear(4, 4), TrainStatus(0, step=1002)).result(120)
    newcomer.save(nn.Linear(4, 4), TrainStatus(0, step=1))


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
