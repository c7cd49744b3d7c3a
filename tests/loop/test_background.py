"""Saving beside the loop: the state of the moment, one save at a time, the newest of those that wait."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

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


class Weight:
    def __init__(self) -> None:
        self.value = torch.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_what_is_saved_is_the_state_of_that_moment(tmp_path: Path) -> None:
    fs, weight = Slow(), Weight()
    saving = CheckPoints(str(tmp_path), fs).begin(weight, TrainStatus(0))
    weight.value += 5  # in place, while it is being saved
    assert not saving.done()
    fs.go.set()
    assert saving.result(120) == 0
    found = graphft.read_check_point(str(tmp_path))
    assert found is not None
    assert torch.equal(found.states["state"]["value"], torch.zeros(4))


def test_one_is_at_work_and_of_those_that_wait_the_newest_is_saved(tmp_path: Path) -> None:
    fs, weight = Slow(), Weight()
    place = CheckPoints(str(tmp_path), fs)
    first = place.begin({"w": weight}, TrainStatus(0))
    assert fs.began.wait(120)
    waiting = [place.begin({"w": weight}, TrainStatus(n)) for n in (1, 2, 3)]
    assert [w.done() for w in waiting] == [True, True, False]
    fs.go.set()
    assert [w.result(120) for w in (first, *waiting)] == [0, None, None, 1]
    found = place.newest()
    assert found is not None
    assert found.status == TrainStatus(3)


def test_of_two_loops_on_one_path_the_older_is_told(tmp_path: Path) -> None:
    one, other = CheckPoints(str(tmp_path)), CheckPoints(str(tmp_path))
    one.save(Weight(), TrainStatus(0, step=1000))
    other.load(Weight())
    one.save(Weight(), TrainStatus(0, step=1001))
    with pytest.raises(GraphftError, match="has saved version 1 meanwhile; the newest that this process knows is 0"):
        other.save(Weight(), TrainStatus(0, step=3))
    newcomer = CheckPoints(str(tmp_path))
    newcomer.save(Weight(), TrainStatus(0, step=0))  # begins anew
    with pytest.raises(GraphftError, match="has saved version 2 meanwhile"):
        one.begin(Weight(), TrainStatus(0, step=1002)).result(120)
    newcomer.save(Weight(), TrainStatus(0, step=1))
