"""The random generators of a process: torch's (also of its devices), NumPy's and Python's global ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def take_random_states() -> dict[str, Any]:
    """What the generators are at now, as an Encoder takes it."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Goes on from there. Of devices, those that there are."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
