"""The records of a job that waits while nobody looks at it: on a busy machine it would be over before it has suffered
what it is to suffer. Roles read them by reference to this file."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

UNSEEN, LONGEST = 0.2, 5.0
"""Seconds without a look after which a batch waits for one; and for how long at most."""


class Products:
    """Record i is a point, and the product of two of its values. While there is a file `looked`, who looks at the job
    touches it."""

    def __init__(self, looked: str) -> None:
        self.x, self.looked = torch.randn(640, 8, generator=torch.Generator().manual_seed(7)), Path(looked)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "y": self.x[i, :1] * self.x[i, 1:2]}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        end = time.monotonic() + LONGEST
        while self._is_unseen() and time.monotonic() < end:
            time.sleep(0.02)
        return [self[i] for i in indices]

    def _is_unseen(self) -> bool:
        try:
            return time.time() - self.looked.stat().st_mtime > UNSEEN
        except FileNotFoundError:
            return False
