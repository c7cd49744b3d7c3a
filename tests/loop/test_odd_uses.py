"""People do what is not quite meant: each an error that says so, or done as they mean it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft import TrainStatus
from graphft.errors import GraphftError


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


def test_the_path_of_a_version(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    graphft.save_check_point(model, TrainStatus(0), tmp_path / "runs" / "one")
    with pytest.raises(GraphftError, match=r"is a version of a checkpoint(.|\n)*runs/one; and version=0"):
        graphft.load_check_point(model, tmp_path / "runs" / "one" / "checkpoint-00000000")


def test_storage_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    url = f"file://{tmp_path}/file"
    with pytest.raises(GraphftError, match=f"{url} cannot be used") as caught:
        graphft.save_check_point(nn.Linear(1, 1), TrainStatus(0), url)
    assert caught.value.rule == "storage"
    assert isinstance(caught.value, OSError), "as before"
    with pytest.raises(GraphftError, match=url):
        graphft.load_check_point(nn.Linear(1, 1), url)
