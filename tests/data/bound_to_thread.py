"""A Dataset that can be read by the thread alone that made it, and that imported its module."""

from __future__ import annotations

import sqlite3
import threading

import torch
from torch import Tensor

SCALE = sqlite3.connect(":memory:")


class Rows:
    def __init__(self, records: int = 96) -> None:
        self.records, self.rows, self.local = records, sqlite3.connect(":memory:"), threading.local()
        self.rows.execute("create table rows (a real, b real, y real)")
        values = torch.randn(records, 3, generator=torch.Generator().manual_seed(3)).tolist()
        self.rows.executemany("insert into rows values (?, ?, ?)", values)
        self.local.offset = 1

    def __len__(self) -> int:
        self.rows.execute("select 1")
        return self.records

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        (scale,) = SCALE.execute("select 2.0").fetchone()
        a, b, y = self.rows.execute("select * from rows where rowid = ?", (i + self.local.offset,)).fetchone()
        return torch.tensor([a, b]) * scale, torch.tensor([y])


class Noisy(Rows):
    """Draws for one record in eight: from then on its batches are made while the thread that trains waits."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return (x + torch.rand(2) if i % 8 == 5 else x), y
