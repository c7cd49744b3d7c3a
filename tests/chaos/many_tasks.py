"""A job of very many small chunks, of two batches each: whoever gives them out has something to do."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import graphft

RECORDS, BATCH = 3200, 16


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--dispatch", choices=("etcd", "coordinator"), default="coordinator")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
    )
    inputs = {"x": ((None, 64), torch.float32), "y": ((None,), torch.int64)}
    program = graphft.build(model, loss_fn, name="many-tasks", inputs=inputs)
    graphft.minimize(program, graphft.Adam(lr=1e-3))
    x = torch.randn(RECORDS, 64)
    data = graphft.arrays(x=x, y=x[:, :8].argmax(1), chunk_size=2 * BATCH)
    job = graphft.transpile(
        program,
        trainers=2,
        pservers=2,
        ft=True,
        data=data,
        batch_size=BATCH,
        epochs=options.passes,
        sync=options.mode == "sync",
        dispatch=options.dispatch,
    )
    job.run()


if __name__ == "__main__":
    main()
