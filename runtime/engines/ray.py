"""The options of Ray. What needs the package is loaded when an engine is opened: `ray_engine.py`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, Run

DEFAULTS = {"trainer": {"CPU": 1}, "pserver": {"CPU": 0}, "coordinator": {"CPU": 0}}
"""By role, what one process takes, unless `resources=` says otherwise. A pserver takes nothing: when a node is lost,
there is room for it among trainers, without which they cannot go on."""


@dataclass(frozen=True, slots=True)
class Ray:
    """A Ray cluster. `address`: as of `ray.init`; "": the one that this process is connected to, $RAY_ADDRESS, or one
    of its own on this machine."""

    address: str = ""

    def open(self, run: Run) -> Engine:
        """Raises UsageError if Ray is not installed here, and ConnectionError if there is none at `address`."""
        if importlib.util.find_spec("ray") is None:
            raise UsageError("the engine ray needs the package ray", rule="engine", help="pip install graphft[ray]")
        from graphft.runtime.engines.ray_engine import RayEngine

        resources = {role: {**usual, **run.resources.get(role, {})} for role, usual in DEFAULTS.items()}
        return RayEngine(run, self.address, resources)
