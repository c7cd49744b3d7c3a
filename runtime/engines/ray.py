"""The options of Ray. What needs the package is loaded when an engine is opened: `ray_engine.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, Run
from graphft.transpiler.config import JobConfig
from graphft.transpiler.record import read_record


@dataclass(frozen=True, slots=True)
class Ray:
    """A Ray cluster. `address`: as of `ray.init`; "": the one that this process is connected to, $RAY_ADDRESS, or one
    of its own on this machine."""

    address: str = ""

    def open(self, run: Run) -> Engine:
        """Raises UsageError if Ray is not installed here, and ConnectionError if there is none at `address`."""
        if importlib.util.find_spec("ray") is None:
            raise UsageError("the engine ray needs the package ray", rule="engine", help="pip install 'ray>=2.40'")
        from graphft.runtime.engines.ray_engine import RayEngine

        return RayEngine(run, self.address, resources_of(read_record(run.job_dir).config, run.resources))


def resources_of(config: JobConfig, given: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns what one process of each role takes: what is `given`, else this. A pserver takes no CPU: when a node is
    lost, there is room for it among trainers, without which they cannot go on. Ray hides GPUs that nobody asks for."""
    usual: dict[str, dict[str, float]] = {"trainer": {"CPU": 1}, "pserver": {"CPU": 0}, "coordinator": {"CPU": 0}}
    for role, device in (("trainer", config.device), ("pserver", config.pserver_device)):
        if device.startswith("cuda"):
            usual[role]["GPU"] = 1
    return {role: {**wants, **given.get(role, {})} for role, wants in usual.items()}
