"""A small job that is trained epoch by epoch; also a script: `-m tests.driver.epochs FOLDER EPOCHS [OPTIONS]`."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import graphft
from graphft import Trainer, Validation, callbacks

PER_EPOCH = 6
"""Steps of an epoch."""
OPTIONS: dict[str, Any] = {"pservers": 2, "batch_size": 8, "checkpoint_every": 4, "lease_ttl": 30, "name": "epochs"}


def data(records: int = 96) -> dict[str, torch.Tensor]:
    x = torch.randn(records, 6, generator=torch.Generator().manual_seed(7))
    return {"x": x, "y": (x.sum(1) > 0).long()}


class Failing:
    """A Dataset that fails while a file is there, or ends its process, if the file says "exit"."""

    def __init__(self, broken: str) -> None:
        self.broken, self.data = Path(broken), data()

    def __len__(self) -> int:
        return len(self.data["y"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.broken.exists():
            if self.broken.read_text() == "exit":
                os._exit(3)
            raise ZeroDivisionError("as the test wants it")
        return {name: column[index] for name, column in self.data.items()}


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2)
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = model(x)
    return torch.nn.functional.cross_entropy(out, y), {"accuracy": (out.argmax(1) == y).float().mean()}


def program() -> graphft.Program:
    return _built().clone()


@functools.cache
def _built() -> graphft.Program:
    """To capture it takes longer than most of what is tried with it."""
    made = model()
    built = graphft.build(made, loss_fn, inputs={"x": (None, 6), "y": ((None,), torch.int64)})
    graphft.minimize(built, torch.optim.Adam(made.parameters(), lr=1e-2), model=made)
    return built


def chunks() -> graphft.DataSpec:
    return graphft.arrays(**data(), chunk_size=16)


def trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        program(), **{"num_workers": 2, "data": chunks(), "quiet": True, "job_dir": str(folder), **OPTIONS, **options}
    )


@functools.cache
def _evaluated() -> graphft.Program:
    return graphft.build(model().eval(), loss_fn, inputs={"x": (None, 6), "y": ((None,), torch.int64)})


def validation() -> Validation:
    return Validation(_evaluated().clone(), graphft.arrays(**data(50), chunk_size=20), 16)


def main() -> None:
    """OPTIONS: the trainer's, and `loggers`, by their names."""
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    if "loggers" in options:
        options["callbacks"] = [getattr(callbacks, name)(place) for name, place in options.pop("loggers").items()]
    with trainer(Path(sys.argv[1]), **options) as made:
        print("epoch", made.epoch, flush=True)
        while made.epoch < int(sys.argv[2]):
            print("done", made.train()["epoch"], flush=True)


if __name__ == "__main__":
    main()
