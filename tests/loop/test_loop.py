"""A loop that ends anywhere and goes on ends with the bits of the one that did not."""

from __future__ import annotations

import copy
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphft
from graphft import Keep, TrainStatus
from graphft.errors import GraphftError
from graphft.runtime.cli import main
from graphft.runtime.fs import LocalFS
from graphft.runtime.loop.check_points import CheckPoints
from tests.loop.loops import BATCHES, EPOCHS, Loop, resumed, same, undisturbed


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


@pytest.mark.parametrize("every", [1, 4, 100])
@pytest.mark.parametrize("url", [False, True])
def test_a_loop_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, every: int, url: bool) -> None:
    path = f"memory://{tmp_path}" if url else str(tmp_path)
    wanted = undisturbed()
    for step in (3, 8, 11, 17):
        run_until(step, path, every)
    assert same(resumed(path), wanted)


@pytest.fixture
def server_of_forks() -> Iterator[None]:
    """A loader's workers are no forks of this process, in which earlier tests have left threads (gRPC's)."""
    multiprocessing.set_forkserver_preload(["torchdata.stateful_dataloader"])
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("server_of_forks")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_in_the_middle_of_a_shuffled_epoch(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loader() -> Any:
        options = {"num_workers": workers, "multiprocessing_context": "forkserver"} if workers else {}
        return stateful.StatefulDataLoader(torch.arange(40), 4, shuffle=True, **options)

    torch.manual_seed(0)
    whole = loader()
    wanted = [batch.tolist() for _ in range(2) for batch in whole]
    torch.manual_seed(0)
    found, first = [], loader()
    for number, batch in enumerate(first):
        found.append(batch.tolist())
        if number == 5:
            graphft.save_check_point({"loader": first}, TrainStatus(-1, 6, 6), str(tmp_path))
            break
    torch.manual_seed(7)
    second = loader()
    assert graphft.load_check_point({"loader": second}, str(tmp_path)) == TrainStatus(-1, 6, 6)
    found += [batch.tolist() for _ in range(2) for batch in second]
    assert found == wanted


def test_between_epochs_the_designs_own_way(tmp_path: Path) -> None:
    """`TrainStatus(epoch)` after each epoch, `range(status.next(), epochs)`."""
    loop = Loop()
    for epoch in range(2):
        saved = graphft.save_check_point(loop.state, TrainStatus(epoch), str(tmp_path), LocalFS(), trainer_id=0)
        assert saved == epoch
    status = graphft.load_check_point(loop.state, str(tmp_path), LocalFS(), trainer_id=1)
    assert status == TrainStatus(1)
    assert list(range(status.next(), EPOCHS)) == [2]


def test_nothing_is_there(tmp_path: Path) -> None:
    loop = Loop()
    assert graphft.load_check_point(loop.state, str(tmp_path / "none")) is None
    assert not (tmp_path / "none").exists()


def test_only_trainer_0_saves_and_all_load(tmp_path: Path) -> None:
    loop, path = Loop(), str(tmp_path)
    assert graphft.save_check_point(loop.state, TrainStatus(), path, trainer_id=1) is None
    with pytest.raises(TimeoutError, match=r"had no checkpoint 0 within 0\.1 s; it has none\nhelp: is trainer 0 alive"):
        graphft.wait_for_check_point(path, 0, timeout=0.1)
    graphft.save_check_point(loop.state, TrainStatus(), path)
    graphft.wait_for_check_point(path, 0, timeout=5)
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
    """A graphft program's state, and with it the random numbers of its dropout."""
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


def test_a_manifest_has_the_digests_of_program_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a job did, and a loop's did not."""

    def made(outputs: int, rows: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, outputs))
        program = graphft.build(model, lambda m, x: m(x).square().mean(), {"x": (None, 4)})
        executor, data = graphft.Executor(), graphft.arrays(x=torch.zeros(rows, 4), chunk_size=2)
        executor.run(program, {"x": torch.zeros(2, 4)})
        path = str(tmp_path / f"{outputs}-{rows}")
        graphft.save_check_point(executor, TrainStatus(), path, main_program=program, data=data)
        assert main(["checkpoint", "show", path]) == 0
        made = CheckPoints(path).store.manifest(0).meta["made"]
        shown = capsys.readouterr().out.splitlines()[1].split("  ")
        assert {f"program {made['program']}", f"data {made['data']}"} < set(shown)
        return made

    first, again, other = made(3, 8), made(3, 8), made(2, 6)
    assert (first["program"], first["data"]) == (again["program"], again["data"])
    assert first["program"] != other["program"]
    assert first["data"] != other["data"]


# -- what does not fit ------------------------------------------------------------------------------------------------


class WiderLoop(Loop):
    """With three outputs instead of one, and no schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.model[3] = nn.Linear(8, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state = {"model": self.model, "optimizer": self.optimizer, "other": nn.Linear(1, 1)}


def test_into_a_changed_model_what_fits_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, wider = Loop(), WiderLoop()
    loop.train(None)
    graphft.save_check_point(loop.state, TrainStatus(2, 18), tmp_path)
    before = wider.model.state_dict()["3.weight"].clone()
    with pytest.raises(GraphftError, match="partial=True"):
        graphft.load_check_point(wider.state, tmp_path)
    assert graphft.load_check_point(wider.state, tmp_path, partial=True) == TrainStatus(2, 18)
    for name, value in loop.model.state_dict().items():
        assert name.startswith("3.") or torch.equal(wider.model.state_dict()[name], value)
    assert torch.equal(wider.model.state_dict()["3.weight"], before)
    assert not wider.optimizer.state, "it is of other parameters"
    (warning,) = [r.getMessage() for r in caplog.records if "loaded in part" in r.getMessage()]
    assert warning.split("not loaded: ")[1].split("; ") == [
        "other is not in the checkpoint",
        "schedule is in the checkpoint, and not given",
        "model: %3.weight is torch.float32 (1, 8), expected torch.float32 (3, 8)",
        "model: %3.bias is torch.float32 (1,), expected torch.float32 (3,)",
        "optimizer: it is another optimizer, or not of a module that fits wholly",
    ]
    wider.model(torch.randn(4, 4)).sum().backward()
    wider.optimizer.step()


def test_what_fits_wholly_is_loaded_wholly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()

    def save(status: TrainStatus) -> None:
        if status.step == 8:
            graphft.save_check_point(loop.state, status, tmp_path)

    loop.train(None, save)
    assert same(resumed(str(tmp_path), partial=True), undisturbed())
    assert "in part" not in caplog.text


def test_of_what_does_not_fit_at_all_nothing_is_loaded(tmp_path: Path) -> None:
    graphft.save_check_point({"model": nn.Linear(2, 2)}, TrainStatus(), tmp_path)
    for state in ({"model": nn.Linear(3, 3)}, {"other": nn.Linear(2, 2)}):
        with pytest.raises(GraphftError, match="nothing of the checkpoint fits"):
            graphft.load_check_point(state, tmp_path, partial=True)


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


def test_a_state_of_the_users_own(tmp_path: Path) -> None:
    counter = Counter()
    counter.count = 3
    graphft.save_check_point(counter, TrainStatus(), str(tmp_path))
    found = Counter()
    graphft.load_check_point(found, str(tmp_path))
    assert found.count == 3


def models_state(loop: Loop) -> list[Any]:
    return [value.clone() for value in loop.model.state_dict().values()]


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "groups", "own"])
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
    before = models_state(loop)
    with pytest.raises(GraphftError) as caught:
        graphft.load_check_point(state, str(tmp_path))
    assert caught.value.rule == "checkpoint-fit"
    assert {
        "missing": "schedule",
        "extra": "more",
        "shape": "0.weight",
        "groups": "parameters",
        "own": "no such count",
    }[change] in caught.value.message
    assert mine.count == 7
    assert all(torch.equal(a, b) for a, b in zip(before, models_state(loop), strict=True))


@pytest.mark.parametrize(
    ("state", "status", "message"),
    [
        ({"model": 3}, TrainStatus(), "has no state_dict"),
        ({}, TrainStatus(), "no state to save"),
        ({"c": Counter()}, TrainStatus(epoch_no=-2), "epoch_no is -2"),
        ({"c": Counter()}, TrainStatus(metrics={"loss": torch.ones(1)}), "expected a number"),  # type: ignore[dict-item]
        ({"c": nn.Linear}, TrainStatus(), "has no state_dict"),
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, state: Any, status: TrainStatus, message: str) -> None:
    with pytest.raises(GraphftError, match=message):
        graphft.save_check_point(state, status, str(tmp_path))
    assert not list(tmp_path.iterdir())


# -- which are kept ---------------------------------------------------------------------------------------------------


def test_which_are_kept(tmp_path: Path) -> None:
    counter = Counter()
    for loss in (5.0, 1.0, 3.0, float("nan"), 2.0, 4.0, 6.0):
        status = TrainStatus(metrics={"loss": loss})
        graphft.save_check_point(counter, status, str(tmp_path), keep=Keep(newest=2, every=4, best="loss"))
    there = sorted(int(p.name.removeprefix("checkpoint-")) for p in tmp_path.iterdir())
    assert there == [0, 1, 4, 5, 6]
    found = graphft.read_check_point(str(tmp_path), version=1)
    assert found is not None
    assert found.status.metrics == {"loss": 1.0}
    with pytest.raises(GraphftError, match=r"no checkpoint 2; it has \[6, 5, 4, 1, 0\]"):
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
    one.store.next_version = lambda: 0  # type: ignore[method-assign]
    assert other.save({"c": Counter()}, TrainStatus()) == 0
    with pytest.raises(GraphftError, match="another process has saved version 0"):
        one.save({"c": Counter()}, TrainStatus())
    assert len(list((tmp_path / "checkpoint-00000000").iterdir())) == 2, "what it wrote is gone"


def test_the_steps_of_an_epoch(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    Loop().train(None, lambda status: seen.append((status.next(), status.step, status.offset)))
    assert seen[:2] == [(0, 1, 1), (0, 2, 2)]
    assert seen[BATCHES] == (1, BATCHES, 0)
    assert seen[-1] == (EPOCHS, EPOCHS * BATCHES, 0)


@pytest.mark.parametrize("width", [4, 2], ids=["another shape", "another dtype"])
def test_two_modules_with_the_same_names_are_two(tmp_path: Path, width: int) -> None:
    """A GAN whose discriminator is another one by now: its optimizer has none of the generator's states."""

    def make(width: int, dtype: torch.dtype) -> dict[str, Any]:
        generator = nn.Sequential(nn.Linear(2, 2))
        discriminator = nn.Sequential(nn.Linear(2, width, dtype=dtype))
        state: dict[str, Any] = {"generator": generator, "discriminator": discriminator}
        for name, module in list(state.items()):
            state[f"{name} optimizer"] = optimizer = torch.optim.Adam(module.named_parameters(), lr=0.1)
            module(torch.ones(1, 2, dtype=module[0].weight.dtype)).sum().backward()
            optimizer.step()
        return state

    saved = make(2, torch.float32)
    graphft.save_check_point(saved, TrainStatus(), tmp_path)
    other = make(width, torch.float32 if width == 4 else torch.float64)
    before = copy.deepcopy(other["discriminator optimizer"].state_dict())
    graphft.load_check_point(other, tmp_path, partial=True)
    after = other["discriminator optimizer"].state_dict()
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][name], value) for name, value in state.items())
    assert after["param_groups"][0]["param_names"] == before["param_groups"][0]["param_names"]
    averages = [make["generator optimizer"].state_dict()["state"][0]["exp_avg"] for make in (saved, other)]
    assert torch.equal(*averages)


def test_names_of_an_optimizers_parameters_stay_those_of_its_own(tmp_path: Path) -> None:
    small, large = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.Adam(model.named_parameters()) for model in (small, large)]
    graphft.save_check_point({"model": small, "optimizer": optimizers[0]}, TrainStatus(), tmp_path)
    graphft.load_check_point({"model": large, "optimizer": optimizers[1]}, tmp_path, partial=True)
    assert optimizers[1].param_groups[0]["param_names"] == [name for name, _ in large.named_parameters()]
