"""Handwritten digits: a convolutional network with batch norm and dropout, captured from torch.

The batch norm's running statistics live on the pservers like the parameters, so the trained model is whole.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import graphft

MODES: dict[str, dict[str, Any]] = {
    "sync": {"sync": True},
    "async": {"sync": False},
    "dc_asgd": {"sync": False, "mode": "dc_asgd"},
    "half_async": {"sync": False, "mode": "half_async", "local_steps": 2},
    "geo_sgd": {"sync": False, "mode": "geo_sgd", "local_steps": 2},
}
"""The ways in which gradients come together, as options of `transpile`."""


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--small", action="store_true", help="a run of seconds, for tests")
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, train = order[:360], order[360:]

    torch.manual_seed(0)
    model = make_model()
    program = graphft.build(
        model, loss_fn, name="digits", inputs={"x": ((None, 1, 8, 8), torch.float32), "y": ((None,), torch.int64)}
    )
    graphft.minimize(program, graphft.Adam(lr=2e-3))
    data = graphft.arrays(x=images[train], y=labels[train], chunk_size=128)
    job = graphft.transpile(
        program,
        trainers=2,
        pservers=2,
        ft=True,
        data=data,
        batch_size=32,
        epochs=2 if options.small else options.passes,
        **MODES[options.mode],
    )
    result = job.run()

    scores = result.predict({"x": images[held_out]})["output"]
    right = (scores.argmax(1) == labels[held_out]).float().mean()
    print(f"held-out accuracy  {right:.4f} of {len(held_out)} images")
    print(f"model              {result.model}")


if __name__ == "__main__":
    main()
