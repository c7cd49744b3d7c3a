"""A training loop with everything that is hard to resume: dropout, momentum, a schedule, an order of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphft import TrainStatus

EPOCHS, BATCHES, BATCH = 3, 6, 4


class Loop:
    """`state` is what is saved; `model` what it ends with."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, EPOCHS * BATCHES)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(
        self, status: TrainStatus | None, after: Callable[[TrainStatus], object] = lambda status: None
    ) -> dict[str, Tensor]:
        """From there to the end. `after` is called after each batch, and each epoch."""
        status = status or TrainStatus()
        x = torch.randn(BATCH * BATCHES, 4, generator=torch.Generator().manual_seed(1))
        for epoch in range(status.next(), EPOCHS):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            for batch in range(status.offset, BATCHES):
                rows = x[order[batch * BATCH : (batch + 1) * BATCH]]
                self.optimizer.zero_grad()
                loss = (self.model(rows)[:, 0] - rows.sum(1)).square().mean()
                loss.backward()
                self.optimizer.step()
                self.schedule.step()
                status = TrainStatus(epoch - 1, status.step + 1, batch + 1, {"loss": loss.item()})
                after(status)
            status = TrainStatus(epoch, status.step, 0, status.metrics)
            after(status)
        return {name: value.clone() for name, value in self.model.state_dict().items()}
