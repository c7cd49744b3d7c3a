"""Jobs that are complete, as far as their folder tells: saved, with a model that no process has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft

FEATURES = 4
RECORDS = 1000
X = torch.randn(RECORDS, FEATURES, generator=torch.Generator().manual_seed(5))


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def complete_job(folder: Path, dim: int | None = None, **options: Any) -> nn.Sequential:
    """Its folder; and the model that it has "trained", in eval mode. `dim`: of the batch, if it is fixed."""
    program = graphft.build(make_model(), loss_fn, {"x": (dim, FEATURES), "y": ((dim,), torch.int64)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = options.pop("data", None) or graphft.arrays(x=X[:64], y=torch.zeros(64).long(), chunk_size=32)
    job = graphft.transpile(program, data=data, **{"batch_size": 32, "trainers": 2, "name": "j", **options})
    job.save(folder)
    model = make_model(1)
    with torch.no_grad():
        model(X)  # statistics of its batch norm
    graphft.save_weights(graphft.load_weights(program, model.state_dict()), None, folder / "model.safetensors")
    return model.eval()


def by_batches(model: nn.Module, x: Tensor, size: int = 32) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(size)])
