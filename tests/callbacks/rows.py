"""Rows of metrics as trainers write them, and a run of which there is nothing but these."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import graphft
from graphft.plan import Plan
from graphft.transpiler import JobConfig

SLOTS, PER_EPOCH, EPOCHS = 2, 4, 3


def config(**options: Any) -> JobConfig:
    """3 epochs of 4 steps, 2 slots with batches of 4 samples."""
    data = graphft.arrays(x=torch.zeros(32, 1), chunk_size=8)
    return JobConfig("rows", data, 4, **{"trainers": SLOTS, "passes": EPOCHS, "ft": True, **options})


def job(**options: Any) -> Any:
    program = SimpleNamespace(attrs={"loss": "loss", "extras": ["accuracy"]})
    return SimpleNamespace(config=config(**options), run_id="0123456789abcdef", trainer_program=lambda: program)


def plan() -> Plan:
    return config().plan


def row(step: int, slot: int, **more: Any) -> dict[str, Any]:
    loss = 1.0 / (step + 1) + slot
    found = {"step": step, "slot": slot, "loss": loss, "metrics": {"accuracy": step / 100}, "samples": 4}
    return found | {"at": 100.0 + step} | more


def append(folder: Path, trainer: str, rows: Iterable[dict[str, Any]], end: str = "") -> None:
    path = folder / "metrics" / f"trainer-{trainer}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in rows) + end)


def loss_of(step: int) -> float:
    """Mean over both slots."""
    return ((1.0 / (step + 1)) * 4 + (1.0 / (step + 1) + 1) * 4) / 8
