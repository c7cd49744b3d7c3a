"""All that torch itself keeps in a state_dict goes on from a checkpoint as it would have without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim import lr_scheduler as schedules

import graphft
from graphft import TrainStatus

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 3),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [3, 6, 6, 9], 0.5),
    "ConstantLR": lambda o: schedules.ConstantLR(o, total_iters=7),
    "LinearLR": lambda o: schedules.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, total_iters=3), schedules.MultiStepLR(o, [1, 4, 6], 0.5)], [4]
    ),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.MultiStepLR(o, [2, 7]), schedules.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.1, 0.5, step_size_up=4, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.5, 12),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 10),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}
OPTIMIZERS = [name for name in torch.optim.__all__ if name[0].isupper() and name not in ("Optimizer", "SparseAdam")]


def test_these_are_all_schedulers() -> None:
    assert {*lr_scheduler.__all__} - {"LRScheduler"} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_goes_on(tmp_path: Path, name: str) -> None:
    def made() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "schedule": SCHEDULERS[name](optimizer)}

    def rates(state: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            state["optimizer"].step()
            state["schedule"].step(*[1.0] * (name == "ReduceLROnPlateau"))
            found.append(state["optimizer"].param_groups[0]["lr"])
        return found

    undisturbed, first, later = rates(made(), 12), made(), made()
    before = rates(first, 5)
    graphft.save_check_point(first, TrainStatus(0), tmp_path)
    graphft.load_check_point(later, tmp_path)
    assert same(later["schedule"].state_dict(), first["schedule"].state_dict())
    assert before + rates(later, 7) == undisturbed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on(tmp_path: Path, name: str) -> None:
    def made() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 4, bias=False)
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
        def loss() -> Any:
            optimizer.zero_grad()
            value = model(torch.eye(3)).square().sum()
            value.backward()
            return value

        for _ in range(steps):
            optimizer.step(loss)

    undisturbed, first, later = made(), made(), made()
    train(*undisturbed, 7)
    train(*first, 3)
    graphft.save_check_point(dict(zip("mo", first, strict=True)), TrainStatus(0), tmp_path)
    graphft.load_check_point(dict(zip("mo", later, strict=True)), tmp_path)
    assert same(later[1].state_dict(), first[1].state_dict())
    train(*later, 4)
    assert same(later[0].state_dict(), undisturbed[0].state_dict())


def test_a_scaler_and_an_average_go_on(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        average = torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(3), use_buffers=True)
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "average": average}  # type: ignore[attr-defined]

    first, later = made(), made()
    first["average"].update_parameters(nn.BatchNorm1d(3))
    first["scaler"].load_state_dict(first["scaler"].state_dict() | {"_growth_tracker": 3})
    graphft.save_check_point(first, TrainStatus(0), tmp_path)
    graphft.load_check_point(later, tmp_path)
    assert all(same(later[name].state_dict(), first[name].state_dict()) for name in first)


class Second(nn.Linear):
    """Its first version had the weights negated: weights of no version are taken for such."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *more)  # type: ignore[no-untyped-call]


def test_the_version_of_a_modules_class_comes_along(tmp_path: Path) -> None:
    first, later = nn.Sequential(Second(2, 2)), nn.Sequential(Second(2, 2))
    graphft.save_check_point({"model": first}, TrainStatus(0), tmp_path)
    graphft.load_check_point({"model": later}, tmp_path)
    assert same(later.state_dict(), first.state_dict())


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
