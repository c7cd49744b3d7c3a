"""Processes ask Ray for what they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphft.runtime.engines.ray import resources_of

NONE: dict[str, float] = {"CPU": 0}


@pytest.mark.parametrize(
    ("devices", "given", "trainer", "pserver"),
    [
        (("cpu", "cpu"), {}, {"CPU": 1}, NONE),
        (("cuda", "cpu"), {}, {"CPU": 1, "GPU": 1}, NONE),
        (("cuda:0", "cuda"), {"pserver": {"GPU": 0.2}}, {"CPU": 1, "GPU": 1}, {"CPU": 0, "GPU": 0.2}),
        (("cuda", "cuda"), {"trainer": {"CPU": 4, "GPU": 0}}, {"CPU": 4, "GPU": 0}, {"CPU": 0, "GPU": 1}),
        (("cpu", "cpu"), {"trainer": {"memory": 8}}, {"CPU": 1, "memory": 8}, NONE),
    ],
)
def test_a_role_on_a_gpu_asks_for_one_unless_told_otherwise(
    devices: tuple[str, str], given: Any, trainer: dict[str, float], pserver: dict[str, float]
) -> None:
    config: Any = SimpleNamespace(device=devices[0], pserver_device=devices[1])
    assert resources_of(config, given) == {"trainer": trainer, "pserver": pserver, "coordinator": NONE}
