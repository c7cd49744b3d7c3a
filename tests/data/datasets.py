"""Datasets that the tests describe by reference."""

from __future__ import annotations

import time
from typing import Any

import torch


class Squares:
    """Record i is (i, i * i)."""

    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(i)]), i * i


class Named(Squares):
    def __getitem__(self, i: int) -> Any:
        return {"y": i * i, "x": torch.tensor([float(i)]), "name": "unused"}


class Noisy(Squares):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return i + torch.rand(1), i


class Slow(Squares):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.02)
        return super().__getitem__(i)


class Broken(Squares):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 13:
            raise ValueError("record 13 is damaged")
        return super().__getitem__(i)


class Uneven(Squares):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(1 if i < 10 else 2), i


def squares(n: int) -> Squares:
    return Squares(n)


def fails() -> Squares:
    raise RuntimeError("no disk")


def no_dataset() -> int:
    return 3
