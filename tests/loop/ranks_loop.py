"""Two ranks of DistributedDataParallel with dropout, each with a data stream of its own.

    RANK=0 WORLD_SIZE=2 python -m tests.loop.ranks_loop FOLDER RENDEZVOUS [KILL_AT]

Rank 0 kills itself before step KILL_AT. Each rank prints the checksum of the model, and of what it drew last.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphft

STEPS, EVERY = 12, 3


class Stream:
    """Batches that are drawn: what a StatefulDataLoader is to its user."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def next(self) -> torch.Tensor:
        return torch.randn(4, 8, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def main(folder: str, rendezvous: str, kill_at: int) -> None:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=count)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    parallel, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    stream = Stream(rank)
    state = {"model": model, "optimizer": optimizer, "ranks": graphft.PerRank(stream=stream)}
    status = graphft.load_check_point(state, folder, trainer_id=rank) or graphft.TrainStatus()
    for step in range(status.step, STEPS):
        if step == kill_at and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        parallel(stream.next()).square().mean().backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            status = graphft.TrainStatus(-1, step + 1, step + 1)
            graphft.save_check_point(state, status, folder, trainer_id=rank)
    digest = hashlib.sha256()
    for value in (*model.state_dict().values(), torch.rand(3), stream.next()):
        digest.update(value.numpy().tobytes())
    print(f"rank {rank} from {status.step}: {digest.hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else -1)
