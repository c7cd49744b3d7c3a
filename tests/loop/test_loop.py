"""A loop that ends anywhere and goes on ends with the bits of the one that did not; what is not meant is an error."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft import TrainStatus
from graphft.errors import GraphftError
from graphft.runtime.loop.check_points import CheckPoints
from tests.loop.loops import Loop
from tests.support.eager import same
from tests.support.hdfs_server import MISSING, hdfs_server


class StoppedError(Exception):
    """The process ends here."""


def run_until(step: int, path: str, every: int = 1, **options: Any) -> None:
    """A loop that saves after every so many batches, and after each epoch, and ends after a step."""
    loop = Loop()

    def after(status: TrainStatus) -> None:
        if status.step % every == 0 or status.offset == 0:
            graphft.save_check_point(loop.state, status, path, **options)
        if status.step == step and status.offset:
            raise StoppedError

    with pytest.raises(StoppedError):
        loop.train(graphft.load_check_point(loop.state, path), after)


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if MISSING:
        pytest.skip(MISSING)
    with hdfs_server(tmp_path_factory.mktemp("hdfs")) as port:
        yield f"hdfs://127.0.0.1:{port}"


@pytest.mark.parametrize(("every", "place"), [(1, ""), (4, "memory:/"), (4, "hdfs")])
def test_a_loop_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, request: pytest.FixtureRequest, every: int, place: str
) -> None:
    path = f"{request.getfixturevalue(place) if place == 'hdfs' else place}{tmp_path}"
    for step in (3, 8, 11, 17):
        run_until(step, path, every)
    loop = Loop()
    assert same(loop.train(graphft.load_check_point(loop.state, path)), Loop().train(None))


def test_torchdatas_loader_goes_on_in_the_middle_of_a_shuffled_epoch(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader() -> Any:
        return stateful.StatefulDataLoader(torch.arange(40), 4, shuffle=True)

    torch.manual_seed(0)
    whole = loader()
    wanted = [batch.tolist() for _ in range(2) for batch in whole]
    torch.manual_seed(0)
    first = loader()
    batches = iter(first)
    found = [next(batches).tolist() for _ in range(6)]
    graphft.save_check_point({"loader": first}, TrainStatus(-1, 6, 6), str(tmp_path))
    torch.manual_seed(7)
    second = loader()
    assert graphft.load_check_point({"loader": second}, str(tmp_path)) == TrainStatus(-1, 6, 6)
    assert found + [batch.tolist() for _ in range(2) for batch in second] == wanted


def test_nothing_is_there(tmp_path: Path) -> None:
    loop = Loop()
    assert graphft.load_check_point(loop.state, str(tmp_path / "none")) is None
    assert not (tmp_path / "none").exists()


def test_only_trainer_0_saves_and_all_load(tmp_path: Path) -> None:
    loop, path = Loop(), str(tmp_path)
    assert graphft.save_check_point(loop.state, TrainStatus(), path, trainer_id=1) is None
    graphft.save_check_point(loop.state, TrainStatus(), path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert graphft.load_check_point(loop.state, path, trainer_id=1) is not None
    assert torch.equal(torch.get_rng_state(), before), "trainer 1 does not go on with trainer 0's random numbers"


def test_random_numbers_go_on(tmp_path: Path) -> None:
    loop = Loop()
    import numpy as np

    graphft.save_check_point(loop.state, TrainStatus(), str(tmp_path))
    wanted = (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random())
    graphft.load_check_point(loop.state, str(tmp_path))
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()) == wanted


def test_an_executor(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    program = graphft.build(model, lambda m, x: m(x).square().mean(), {"x": (None, 4)})
    graphft.minimize(program, graphft.Adam(lr=0.1))
    x = torch.randn(8, 4)

    def run(executor: graphft.Executor, count: int) -> list[float]:
        return [float(executor.run(program, {"x": x}, ["loss"])["loss"]) for _ in range(count)]

    one, other = graphft.Executor(seed=3), graphft.Executor(seed=3)
    run(one, 2)
    graphft.save_check_point(one, TrainStatus(step=2), str(tmp_path), main_program=program)
    wanted = run(one, 3)
    status = graphft.load_check_point(other, str(tmp_path), main_program=program)
    assert status == TrainStatus(step=2)
    assert run(other, 3) == wanted
    with pytest.raises(GraphftError, match="main_program is not given"):
        graphft.save_check_point(one, TrainStatus(), str(tmp_path))


# -- what does not fit ------------------------------------------------------------------------------------------------


class Counter:
    """Something of the user's own."""

    def __init__(self, refuses: bool = False) -> None:
        self.count, self.refuses = 7, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.refuses and self.count != 7:
            raise ValueError("no such count")


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "groups", "order", "own"])
def test_what_does_not_fit_changes_nothing(tmp_path: Path, change: str) -> None:
    saved = Loop()
    saved.train(None)
    own = Counter()
    own.count = 4
    graphft.save_check_point({**saved.state, "own": own}, TrainStatus(), str(tmp_path))
    loop, mine = Loop(), Counter(refuses=change == "own")
    state = {**loop.state, "own": mine}
    if change == "missing":
        del state["schedule"]
    elif change == "extra":
        state["more"] = Counter()
    elif change == "shape":
        loop.model[0] = nn.Linear(4, 9)
    elif change == "groups":
        state["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in loop.model.parameters()])
    elif change == "order":
        state["optimizer"] = torch.optim.AdamW([*loop.model.parameters()][::-1])
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with pytest.raises(GraphftError, match=r"^error\[checkpoint-fit\]") as caught:
        graphft.load_check_point(state, str(tmp_path))
    assert {
        "missing": "schedule",
        "extra": "more",
        "shape": "0.weight",
        "groups": "parameter groups",
        "order": "another order",
        "own": "no such count",
    }[change] in caught.value.message
    assert mine.count == 7 or change in ("own", "groups")
    assert same(before, loop.model.state_dict())


@pytest.mark.parametrize(
    ("state", "status", "message"),
    [
        ({"model": 3}, TrainStatus(), "has no state_dict"),
        ({}, TrainStatus(), "no state to save"),
        ({"c": Counter()}, TrainStatus(epoch_no=-2), "'epoch_no': -2"),
        ({"c": Counter()}, TrainStatus(metrics={"loss": torch.ones(1)}), "expected a number"),  # type: ignore[dict-item]
        ({"c": nn.Linear}, TrainStatus(), "has no state_dict"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, state: Any, status: TrainStatus, message: str) -> None:
    with pytest.raises(GraphftError, match=message):
        graphft.save_check_point(state, status, str(tmp_path))
    assert not list(tmp_path.iterdir())


# -- which are kept ---------------------------------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for _ in range(5):
        graphft.save_check_point(Counter(), TrainStatus(metrics={"loss": 1.0}), str(tmp_path), keep=2)
    found = graphft.read_check_point(str(tmp_path), version=3)
    assert found is not None
    assert found.status.metrics == {"loss": 1.0}
    with pytest.raises(GraphftError, match=r"no checkpoint 2; it has \[4, 3\]"):
        graphft.read_check_point(str(tmp_path), version=2)


def test_what_a_crash_left_goes_with_the_next_save(tmp_path: Path) -> None:
    counter = Counter()
    graphft.save_check_point(counter, TrainStatus(), str(tmp_path))
    (tmp_path / "checkpoint-00000001").mkdir()
    (tmp_path / "checkpoint-00000001" / "tensors-abc.safetensors").write_bytes(b"half")
    assert graphft.load_check_point(counter, str(tmp_path)) is not None
    assert graphft.save_check_point(counter, TrainStatus(), str(tmp_path)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-00000000", "checkpoint-00000002"]


def test_two_that_save_to_one_place_find_each_other(tmp_path: Path) -> None:
    one, other = (CheckPoints(str(tmp_path)) for _ in range(2))
    one.store.versions = list  # type: ignore[method-assign]
    assert other.save({"c": Counter()}, TrainStatus()) == 0
    with pytest.raises(GraphftError, match="another process has saved version 0"):
        one.save({"c": Counter()}, TrainStatus())
    assert len(list((tmp_path / "checkpoint-00000000").iterdir())) == 2, "what it wrote is gone"


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
