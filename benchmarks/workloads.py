"""The jobs that the benchmarks of whole runs train: small, and of data made here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from flights_model import CARDINALITIES, Flights
from torch import Tensor, nn

import graphft
from graphft.transpiler.job import Job

FOREVER = 500
"""Passes of a job that is stopped, not waited for: some minutes."""


def _flights_loss(model: nn.Module, codes: Tensor, distance: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(codes, distance), y)


def _image_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def flights(**options: Any) -> Job:
    """Flights: 2 trainers and 2 pservers, batches of 256, 512 steps per pass. `options` are those of `transpile`."""
    torch.manual_seed(0)
    n = 262_144
    codes = torch.stack([torch.randint(c, (n,)) for c in CARDINALITIES], 1)
    data = graphft.arrays(codes=codes, distance=torch.randn(n), y=torch.randint(2, (n,)), chunk_size=4096)
    program = graphft.build(
        Flights(),
        _flights_loss,
        inputs={
            "codes": ((None, len(CARDINALITIES)), torch.int64),
            "distance": ((None,), torch.float32),
            "y": ((None,), torch.int64),
        },
    )
    return _job(program, data, {"name": "flights", "batch_size": 256, **options})


def convnet(**options: Any) -> Job:
    """A conv net with batch norm on 16 x 16 images: 0.02 M parameters; batches of 32, 256 steps per pass."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 36, 10),
    )
    n = 16_384
    data = graphft.arrays(x=torch.randn(n, 3, 16, 16), y=torch.randint(10, (n,)), chunk_size=512)
    program = graphft.build(
        model, _image_loss, inputs={"x": ((None, 3, 16, 16), torch.float32), "y": ((None,), torch.int64)}
    )
    return _job(program, data, {"name": "convnet", "batch_size": 32, **options})


class Transformer(nn.Module):
    """A language model: 0.5 M parameters."""

    def __init__(self, vocabulary: int = 256, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.embed(tokens) + self.places.weight))
        return out


def _tokens_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def transformer(**options: Any) -> Job:
    """A small transformer on 64 tokens, dropout included: batches of 16, 256 steps per pass."""
    torch.manual_seed(0)
    data = graphft.arrays(tokens=torch.randint(256, (8192, 64)), chunk_size=256)
    program = graphft.build(Transformer(), _tokens_loss, inputs={"tokens": ((None, 64), torch.int64)})
    return _job(program, data, {"name": "transformer", "batch_size": 16, **options})


def _job(program: graphft.Program, data: Any, options: dict[str, Any]) -> Job:
    graphft.minimize(program, graphft.Adam(lr=1e-3))
    job: Job = graphft.transpile(
        program, data=data, **{"trainers": 2, "pservers": 2, "sync": True, "ft": True, "epochs": FOREVER, **options}
    )
    return job
