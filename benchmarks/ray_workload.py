"""One model on the same records, for graphft and for Ray Train: what `ray_recovery.py` compares."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORKERS, BATCH, CHUNK = 3, 16, 160
STEPS_PER_EPOCH, EVERY = 60, 10
"""EVERY: steps between two checkpoints, of both."""
RECORDS = STEPS_PER_EPOCH * WORKERS * BATCH


class Points:
    """Record i is a point and its class. To read a batch takes the seconds that the file `pace` has."""

    def __init__(self, pace: str) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(RECORDS, 64, generator=generator)
        self.y = self.x[:, :10].argmax(1)
        self.pace = Path(pace)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        time.sleep(float(self.pace.read_text()))
        return [self[i] for i in indices]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def trainer(pace: Path, epochs: int, **options: Any) -> Any:
    """graphft's, as its documentation has it."""
    import graphft

    program = graphft.build(model(), loss_of, inputs={"x": (None, 64), "y": ((None,), torch.int64)})
    graphft.minimize(program, graphft.Adam(lr=1e-3))
    data = graphft.dataset(f"{__file__}:Points", {"pace": str(pace)}, chunk_size=CHUNK)
    usual = {"num_workers": WORKERS, "pservers": 2, "seed": 11, "name": "points", "quiet": True}
    intervals = {"checkpoint_every": EVERY, "checkpoint_seconds": 0}
    return graphft.Trainer(program, data=data, batch_size=BATCH, max_epochs=epochs, **{**usual, **intervals, **options})


def train_loop(config: dict[str, Any]) -> None:
    """Ray Train's, as its documentation has it: DDP, a checkpoint every EVERY steps. Rank 0 notes each step."""
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    net = ray.train.torch.prepare_model(model())
    plain = getattr(net, "module", net)  # one worker alone has no DDP around it
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    points, step = Points(config["pace"]), 0
    if found := ray.train.get_checkpoint():
        with found.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        plain.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < config["steps"]:
        first = (step * WORKERS + rank) * BATCH
        batch = points.__getitems__([i % RECORDS for i in range(first, first + BATCH)])
        x, y = (torch.stack(column) for column in zip(*batch, strict=True))
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            with open(config["progress"], "a") as file:
                file.write(f"{step} {world}\n")
        if step % EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    state = {"net": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, os.path.join(folder, "state.pt"))
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": step}, checkpoint=checkpoint)
