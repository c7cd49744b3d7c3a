"""The optimizer's state with the weights, to and from torch's own checkpoints: torch itself goes on to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import graphft
from graphft.errors import GraphftError
from graphft.runtime.coordination.job_files import publish
from graphft.runtime.interchange.training_state import optimizer_of, read_job, read_optimizer
from tests.interchange.test_job_state import X, Y, make_job, make_model
from tests.interchange.test_reshard import begin_in, states
from tests.support.eager import same

pytestmark = pytest.mark.usefixtures("forks")
Parameters = Any
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
    optimizer.step()


def in_groups(model: nn.Sequential, make: Callable[[Parameters], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The last layer has a learning rate of its own, and comes first."""
    return make(
        [{"params": model[3].parameters(), "lr": 0.01}, {"params": [*model[0].parameters(), *model[1].parameters()]}]
    )


def save_loop(path: Path, name: str, grouped: bool = False) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = make_model()
    optimizer = in_groups(model, OPTIMIZERS[name]) if grouped else OPTIMIZERS[name](model.parameters())
    for k in range(5):
        step(model, optimizer, torch.arange(8 * k, 8 * k + 8))
    graphft.save_check_point({"model": model, "optimizer": optimizer}, graphft.TrainStatus(0, 5), path)
    return model, optimizer


@pytest.mark.parametrize(("name", "grouped"), [("adamw", True), ("sgd", False)])
def test_training_goes_on_with_what_a_loop_saved(tmp_path: Path, name: str, grouped: bool) -> None:
    model, optimizer = save_loop(tmp_path / "run", name, grouped)
    again, make = graphft.load_into(make_model(9), graphft.read_weights(tmp_path / "run")), OPTIMIZERS[name]
    theirs = in_groups(again, make) if grouped else make(again.parameters())
    assert graphft.load_optimizer(theirs, again, tmp_path / "run") == 5
    for trained, by in ((model, optimizer), (again, theirs)):
        step(trained, by, torch.arange(40, 48))
    assert same(model.state_dict(), again.state_dict())


@pytest.mark.slow
def test_torch_goes_on_with_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, first = OPTIMIZERS["adamw"], make_model()
    folder = Path(make_job(3, first, in_groups(first, make)).run(quiet=True).model).parent
    model, state = graphft.load_into(make_model(), graphft.read_weights(folder)), read_job(folder)
    optimizer = in_groups(model, make)
    assert graphft.load_optimizer(optimizer, model, folder) == 8
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state.optimizer[name]["exp_avg"])
    found, own = optimizer_of(state)["param_groups"], optimizer.param_groups
    for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"):
        assert sorted(group[key] for group in found) == sorted(group[key] for group in own)


@pytest.mark.parametrize("way", ["names", "flat", "numbers"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_job_goes_on_with_what_torch_saved(tmp_path: Path, name: str, way: str) -> None:
    """A user of torch.distributed.checkpoint may put the optimizer there in any of these ways."""
    model = make_model()
    optimizer = in_groups(model, OPTIMIZERS[name])
    for k in range(3):
        step(model, optimizer, torch.arange(8 * k, 8 * k + 8))
    options = StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    state = optimizer.state_dict() if way == "numbers" else get_optimizer_state_dict(model, optimizer, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "d")
    fresh = graphft.load_into(make_model(3), graphft.read_weights(tmp_path / "d"))
    other = in_groups(fresh, OPTIMIZERS[name])
    assert graphft.load_optimizer(other, fresh, tmp_path / "d", "optim") == (3 if name == "adamw" else 0)
    job = make_job(1, fresh, other)
    assert torch.equal(
        job.source.values["0.weight@exp_avg" if name == "adamw" else "0.weight@momentum_buffer"],
        optimizer.state[model[0].weight]["exp_avg" if name == "adamw" else "momentum_buffer"],
    )
    step(model, optimizer, torch.arange(8))
    step(fresh, other, torch.arange(8))
    assert same(model.state_dict(), fresh.state_dict())
    with pytest.raises(GraphftError, match="has no 'optimizer'"):
        graphft.load_optimizer(other, fresh, tmp_path / "d")


def test_what_has_no_optimizer_or_no_names(tmp_path: Path) -> None:
    model, optimizer = save_loop(tmp_path / "run", "sgd")
    graphft.save_check_point({"optimizer": optimizer}, graphft.TrainStatus(), tmp_path / "alone")
    other = OPTIMIZERS["sgd"](model.parameters())
    assert graphft.load_optimizer(other, model, tmp_path / "alone") == 0, "by number it can be loaded"
    assert torch.equal(other.state[model[3].bias]["momentum_buffer"], optimizer.state[model[3].bias]["momentum_buffer"])
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    for source, name, says in (("run", "adam", "has no 'adam'"), ("w.safetensors", "optimizer", "has no state of an")):
        with pytest.raises(GraphftError, match=says):
            graphft.load_optimizer(other, model, tmp_path / source, name)


def test_a_jobs_storage_by_its_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage"
    job = make_job(2, storage=url)
    job.save(tmp_path / "job")
    publish(tmp_path / "job")
    begin_in(tmp_path / "job", states(job))
    there, here = (read_optimizer(source).state for source in (url, tmp_path / "job"))
    assert there.keys() == here.keys() == dict(make_model().named_parameters()).keys()
    assert all(torch.equal(there[n][key], here[n][key]) for n in here for key in here[n])
    assert read_optimizer(url).step == 5
