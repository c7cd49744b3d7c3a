"""The flights' model, without graphft: `workloads.py` and `torch_recovery.py` train it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CARDINALITIES = (16, 3, 105, 12, 20, 7)
"""These are the sizes of the flights' categorical columns: carrier, origin, destination, month, hour, weekday."""


class Flights(nn.Module):
    """Embeddings and an MLP, as in examples/03_flights.py: 0.1 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(n, 16) for n in CARDINALITIES)
        self.layers = nn.Sequential(
            nn.Linear(16 * len(CARDINALITIES) + 1, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
        )

    def forward(self, codes: Tensor, distance: Tensor) -> Tensor:
        parts = [embed(codes[:, i]) for i, embed in enumerate(self.embed)]
        out: Tensor = self.layers(torch.cat([*parts, distance[:, None]], 1))
        return out
