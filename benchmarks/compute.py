"""Replaying a captured step, and op eager_step, against eager forward and backward, on one thread; what a check costs.

    python benchmarks/compute.py [--rounds 200]

Prints, per model, the median times (interleaved, so that a busy machine slows all) and their ratios, the seconds that a
capture takes, and those of its comparison with the module, on half a batch as `transpile` does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def built(model: nn.Module, batch: Mapping[str, Tensor], **options: Any) -> graphft.Program:
    inputs: Inputs = {n: ((None, *t.shape[1:]), t.dtype) for n, t in batch.items()}
    return graphft.build(model, classify, inputs, **options)


def step_of(program: graphft.Program, batch: Mapping[str, Tensor]) -> Callable[[], object]:
    wanted = ["loss", *(graphft.grad_name(v.name) for v in program.of_kind(graphft.Kind.PARAM))]
    run = lower(program.block("step"), fetch=wanted)
    context = Context(scope={**{n: v.clone() for n, v in program.values.items()}, **batch})
    return lambda: run(context, context.scope)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(steps: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each, interleaved."""
    times = [[seconds(step) for step in steps] for _ in range(rounds)]
    return [statistics.median(series) for series in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="measured steps per model (default 200)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for make in (mlp, convnet, transformer):
        torch.manual_seed(0)
        model, batch = make()

        def eager(model: nn.Module = model, batch: Mapping[str, Tensor] = batch) -> None:
            model.zero_grad()
            classify(model, **batch).backward()

        program = built(model, batch)
        steps = [eager, step_of(program, batch), step_of(built(model, batch, capture=False), batch)]
        measure(steps, 10)
        a, b, c = measure(steps, rounds)
        half = {n: t[: len(t) // 2] for n, t in batch.items()}
        capture, check = (
            statistics.median(seconds(call) for _ in range(5))
            for call in (partial(built, model, batch), partial(graphft.check_capture, program, [half, half]))
        )
        print(
            f"{make.__name__:12} eager {a * 1e3:7.3f} ms   replay {b * 1e3:7.3f} ms, {b / a:.3f}   eager_step "
            f"{c * 1e3:7.3f} ms, {c / a:.3f}   capture {capture:6.3f} s   check {check:6.3f} s, {check / capture:.3f}"
        )


if __name__ == "__main__":
    main()
