"""What people do that is not quite what was meant: each an error that says so, or done as they mean it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft import Keep, LocalFS, TrainStatus
from graphft.errors import GraphftError
from graphft.runtime.loop.check_points import CheckPoints


class Extra(nn.Linear):
    """With a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 3}


@pytest.mark.parametrize(("saved", "given"), [(nn.Linear, Extra), (Extra, nn.Linear)])
def test_a_refused_load_changes_nothing(tmp_path: Path, saved: type[nn.Linear], given: type[nn.Linear]) -> None:
    graphft.save_check_point({"model": saved(2, 1)}, TrainStatus(0), tmp_path)
    model = given(2, 1)
    before = model.weight.clone()
    with pytest.raises(GraphftError, match=r"_extra_state is (missing|not expected)"):
        graphft.load_check_point({"model": model}, tmp_path)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    "tensor", [torch.ones(1, 4)[:, 0], torch.tensor(5.0).expand(1), torch.arange(2.0)[::2], torch.zeros(0, 3)[:, ::2]]
)
def test_tensors_of_odd_strides(tmp_path: Path, tensor: torch.Tensor) -> None:
    class Odd:
        value = tensor

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    graphft.save_check_point(Odd(), TrainStatus(0), tmp_path)
    odd = Odd()
    graphft.load_check_point(odd, tmp_path)
    assert torch.equal(odd.value, tensor)


def test_the_path_of_a_version(tmp_path: Path) -> None:
    """None would be a start from nothing."""
    model = nn.Linear(1, 1)
    graphft.save_check_point(model, TrainStatus(0), tmp_path / "runs" / "one")
    with pytest.raises(GraphftError, match=r"is a version of a checkpoint(.|\n)*runs/one; and version=0"):
        graphft.load_check_point(model, tmp_path / "runs" / "one" / "checkpoint-00000000")


@pytest.mark.parametrize("place", ["/proc/nothing", "/dev/null/there"])
def test_a_first_save_where_none_can_be_fails_at_once(place: str) -> None:
    slept: list[float] = []
    with pytest.raises(OSError, match=r"nothing|null|there"):
        CheckPoints(place, sleep=slept.append).save(nn.Linear(1, 1), TrainStatus(0))
    assert not slept


def test_storage_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    """A storage's own came up with tens of frames of a library, and without the URL's scheme."""
    (tmp_path / "file").write_text("")
    url = f"file://{tmp_path}/file"
    with pytest.raises(GraphftError, match=f"{url} cannot be used") as caught:
        graphft.save_check_point(nn.Linear(1, 1), TrainStatus(0), url)
    assert caught.value.rule == "storage"
    assert isinstance(caught.value, OSError), "as before"
    with pytest.raises(GraphftError, match=url):
        graphft.load_check_point(nn.Linear(1, 1), url)


def test_an_error_that_nobody_thought_of_ends_one_save(tmp_path: Path) -> None:
    """The thread ended with it: no later save was ever made, and `wait` never returned."""

    class Odd(LocalFS):
        broken = True

        def delete(self, path: str) -> None:
            if self.broken:
                raise LookupError("client closed")
            super().delete(path)

        def writing(self, path: str) -> Any:
            if threading.current_thread() is not threading.main_thread() and self.broken:
                raise LookupError("client closed")
            return super().writing(path)

    fs, model = Odd(), nn.Linear(1, 1)
    place = CheckPoints(str(tmp_path), fs, keep=1)
    for epoch in range(2):
        place.save(model, TrainStatus(epoch))  # nothing can be deleted
    with pytest.raises(LookupError):
        place.begin(model, TrainStatus(2)).wait(120)
    fs.broken = False
    assert place.begin(model, TrainStatus(3)).wait(120) == 2
    place.wait()


def test_each_tenth_is_kept_also_where_a_kill_took_its_number() -> None:
    versions = [0, 1, *range(11, 26)]
    assert Keep(newest=1, every=10).of([(v, None) for v in versions]) == {0, 11, 20, 25}
    there: list[int] = []
    for version in versions:  # the same, when each save deletes
        there = sorted(Keep(newest=1, every=10).of([(v, None) for v in [*there, version]]))
    assert there == [0, 11, 20, 25]
