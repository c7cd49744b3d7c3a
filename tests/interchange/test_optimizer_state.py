"""The optimizer's state with the weights, to and from torch's own checkpoints: torch itself goes on to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import graphft
from graphft.errors import GraphftError
from graphft.runtime.coordination.job_files import publish
from graphft.runtime.interchange.training_state import read_optimizer, read_training
from tests.interchange import test_job_state
from tests.interchange.test_reshard import begin_in, states
from tests.support.commands import refused, shown

Parameters = Any
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, lr_decay=0.01),
}
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()


def in_groups(model: nn.Sequential, make: Callable[[Parameters], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """The last layer has a learning rate of its own, and comes first."""
    return make(
        [{"params": model[3].parameters(), "lr": 0.01}, {"params": [*model[0].parameters(), *model[1].parameters()]}]
    )


def loaded_by_torch(folder: Path, make: Callable[[nn.Sequential], torch.optim.Optimizer]) -> tuple[Any, Any]:
    """As torch's tutorial does it."""
    model = make_model(9)
    optimizer = make(model)
    weights, state = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return model, optimizer


def same_model(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def save_loop(path: Path, name: str, grouped: bool = False) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = make_model()
    optimizer = in_groups(model, OPTIMIZERS[name]) if grouped else OPTIMIZERS[name](model.parameters())
    for k in range(5):
        step(model, optimizer, torch.arange(8 * k, 8 * k + 8))
    graphft.save_check_point({"model": model, "optimizer": optimizer}, graphft.TrainStatus(0, 5), path)
    return model, optimizer


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_goes_on_with_what_a_loop_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, grouped: bool
) -> None:
    model, optimizer = save_loop(tmp_path / "run", name, grouped)
    said = shown(capsys, "checkpoint", "export", tmp_path / "run", tmp_path / "d", "--format", "dcp", "--optimizer")
    assert "tensors of 'model'" in said

    def make(m: nn.Sequential) -> torch.optim.Optimizer:
        changed = OPTIMIZERS[name]
        return in_groups(m, changed) if grouped else changed(m.parameters())

    again, theirs = loaded_by_torch(tmp_path / "d", make)
    assert theirs.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for k in (5, 6):
        step(model, optimizer, torch.arange(8 * k, 8 * k + 8))
        step(again, theirs, torch.arange(8 * k, 8 * k + 8))
    assert same_model(model, again)


def make_job(name: str, model: nn.Sequential, passes: int, job: str) -> graphft.Job:
    program = graphft.build(
        model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), {"x": (None, 8), "y": ((None,), torch.int64)}
    )
    graphft.minimize(program, in_groups(model, OPTIMIZERS[name]), model=model)
    data = graphft.arrays(x=x, y=y, chunk_size=16)
    return graphft.transpile(
        program, data=data, batch_size=8, pservers=3, ft=True, slice_unit=64, min_block=64, epochs=passes, name=job
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_torch_goes_on_with_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In groups, options and rates included: what torch loads is what `load_optimizer` gives, and the options."""
    monkeypatch.chdir(tmp_path)
    folder = Path(make_job(name, make_model(), 2, "j").run(quiet=True).model).parent
    capsys.readouterr()
    shown(capsys, "checkpoint", "export", folder, "d", "--format", "dcp", "--optimizer", "--version", "16")
    again, theirs = loaded_by_torch(tmp_path / "d", lambda m: in_groups(m, OPTIMIZERS[name]))
    model = graphft.load_into(make_model(), graphft.read_weights(folder))
    optimizer = in_groups(model, OPTIMIZERS[name])
    assert graphft.load_optimizer(optimizer, model, folder) == 16
    assert theirs.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    step(model, optimizer, torch.arange(8))
    step(again, theirs, torch.arange(8))
    assert same_model(model, again)
    fresh = make_model()
    other = in_groups(fresh, OPTIMIZERS[name])
    graphft.load_into(fresh, graphft.read_weights(tmp_path / "d"))
    assert graphft.load_optimizer(other, fresh, tmp_path / "d") == (16 if name == "adamw" else 0)
    step(fresh, other, torch.arange(8))
    assert same_model(model, fresh), "and back from that directory"


@pytest.mark.parametrize("way", ["names", "flat", "numbers"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_job_goes_on_with_what_torch_saved(tmp_path: Path, name: str, way: str) -> None:
    """However a user of torch.distributed.checkpoint puts the optimizer there."""
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
    job = make_job_with(fresh, other)
    assert torch.equal(
        job.source.values["0.weight@exp_avg" if name == "adamw" else "0.weight@momentum_buffer"],
        optimizer.state[model[0].weight]["exp_avg" if name == "adamw" else "momentum_buffer"],
    )
    step(model, optimizer, torch.arange(8))
    step(fresh, other, torch.arange(8))
    assert same_model(model, fresh)
    with pytest.raises(GraphftError, match="has no 'optimizer'"):
        graphft.load_optimizer(other, fresh, tmp_path / "d")


def make_job_with(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> graphft.Job:
    program = graphft.build(
        model, lambda m, x, y: nn.functional.cross_entropy(m(x), y), {"x": (None, 8), "y": ((None,), torch.int64)}
    )
    graphft.minimize(program, optimizer, model=model)
    return graphft.transpile(program, data=graphft.arrays(x=x, y=y, chunk_size=16), batch_size=8, name="j")


def test_what_has_no_optimizer_or_no_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = save_loop(tmp_path / "run", "sgd")
    graphft.save_check_point({"optimizer": optimizer}, graphft.TrainStatus(), tmp_path / "alone")
    export = ("--format", "dcp", "--optimizer")
    nameless = read_optimizer(tmp_path / "alone")
    with pytest.raises(GraphftError, match="names of the optimizer's parameters are not known"):
        nameless.by_name()
    other = OPTIMIZERS["sgd"](model.parameters())
    assert graphft.load_optimizer(other, model, tmp_path / "alone") == 0, "by number it can be loaded"
    assert torch.equal(other.state[model[3].bias]["momentum_buffer"], optimizer.state[model[3].bias]["momentum_buffer"])
    assert "has no optimizer 'adam'" in refused(
        capsys, "checkpoint", "export", tmp_path / "run", tmp_path / "d", *export, "adam"
    )
    assert "goes with --format dcp" in refused(
        capsys, "checkpoint", "export", tmp_path / "run", tmp_path / "d", "--optimizer"
    )
    graphft.save_check_point({"model": model}, graphft.TrainStatus(), tmp_path / "weights")
    shown(capsys, "checkpoint", "export", tmp_path / "weights", tmp_path / "w.safetensors")
    assert "has no state of an optimizer" in refused(
        capsys, "checkpoint", "export", tmp_path / "w.safetensors", tmp_path / "d", *export
    )
    assert not (tmp_path / "d").exists()


def test_a_jobs_storage_by_its_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/storage"
    job = test_job_state.make_job(2, storage=url)
    job.save(tmp_path / "job")
    publish(tmp_path / "job")
    begin_in(tmp_path / "job", states(job))
    (there, model), (here, own) = ((f.state, m) for m, f in (read_training(s, "", "") for s in (url, tmp_path / "job")))
    assert there.keys() == here.keys() == dict(test_job_state.make_model().named_parameters()).keys()
    assert all(torch.equal(there[n][key], here[n][key]) for n in here for key in here[n])
    assert model.keys() == own.keys()
    assert read_optimizer(url).step == 5
