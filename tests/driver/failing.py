"""A Dataset that fails while a file is there, or ends its process, if the file says "exit"."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.driver import epochs


class Failing:
    def __init__(self, broken: str) -> None:
        self.broken, self.data = Path(broken), epochs.data()

    def __len__(self) -> int:
        return len(self.data["y"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.broken.exists():
            if self.broken.read_text() == "exit":
                os._exit(3)
            raise ZeroDivisionError("as the test wants it")
        return {name: column[index] for name, column in self.data.items()}
