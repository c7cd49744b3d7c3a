"""Replaying a captured step against eager forward and backward, on one thread.

    python benchmarks/compute.py [--rounds 200]

Prints, per model, the median times of both (interleaved, so that a busy machine slows both) and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphft
from graphft.ops.context import Context
from graphft.runtime.execute.lowering import lower

Inputs = Mapping[str, Any]


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, {"x": torch.randn(32, 64), "y": torch.randint(10, (32,))}


def convnet() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(32 * 36, 10),
    )
    return model, {"x": torch.randn(32, 3, 16, 16), "y": torch.randint(10, (32,))}


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


def transformer() -> tuple[nn.Module, dict[str, Tensor]]:
    return Encoder(6), {"x": torch.randint(1000, (8, 32)), "y": torch.randint(10, (8,))}


def steps(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
    """One step of eager torch, and the same step of the captured program."""
    inputs: Inputs = {n: ((None, *t.shape[1:]), t.dtype) for n, t in batch.items()}
    program = graphft.build(model, classify, inputs)
    wanted = ["loss", *(graphft.grad_name(n) for n, _ in model.named_parameters())]
    run = lower(program.block("step"), fetch=wanted)
    context = Context(scope={**{n: v.clone() for n, v in program.values.items()}, **batch})

    def eager() -> None:
        model.zero_grad()
        classify(model, **batch).backward()

    return eager, lambda: run(context, context.scope)


def measure(eager: Callable[[], object], replay: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of both, interleaved."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for fn, series in zip((eager, replay), times, strict=True):
            start = time.perf_counter()
            fn()
            series.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="measured steps per model (default 200)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for make in (mlp, convnet, transformer):
        torch.manual_seed(0)
        eager, replay = steps(*make())
        measure(eager, replay, 10)
        a, b = measure(eager, replay, rounds)
        print(f"{make.__name__:12} eager {a * 1e3:8.3f} ms   replay {b * 1e3:8.3f} ms   ratio {b / a:.3f}")


if __name__ == "__main__":
    main()
