"""A run of which there is nothing but its table of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import graphft
from graphft.transpiler import JobConfig
from tests.support.metric_rows import write_rows

SLOTS, PER_EPOCH, EPOCHS = 2, 4, 3


def config(**options: Any) -> JobConfig:
    """3 epochs of 4 steps, 2 slots with batches of 4 samples."""
    data = graphft.arrays(x=torch.zeros(32, 1), chunk_size=8)
    return JobConfig("rows", data, 4, **{"trainers": SLOTS, "passes": EPOCHS, "ft": True, **options})


def job(**options: Any) -> Any:
    program = SimpleNamespace(attrs={"loss": "loss", "extras": ["accuracy"]})
    return SimpleNamespace(config=config(**options), run_id="0123456789abcdef", trainer_program=lambda: program)


def write(folder: Path, steps: Sequence[int]) -> None:
    write_rows(folder, map(loss_of, steps), steps[0], samples=8, accuracy=0.5)


def loss_of(step: int) -> float:
    return 1.0 / (step + 1)
