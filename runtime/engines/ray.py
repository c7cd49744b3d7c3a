"""The options of Ray. What needs the package is loaded when an engine is opened: `ray_engine.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, Run

Resources = Mapping[str, Mapping[str, float]]
DEFAULTS: Resources = {"trainer": {"CPU": 1}, "pserver": {"CPU": 1}, "coordinator": {"CPU": 0}}


@dataclass(frozen=True, slots=True)
class Ray:
    """A Ray cluster.

    `address`: as of `ray.init`; "": the one that this process is connected to, $RAY_ADDRESS, or one of its own on this
    machine. `resources`: by role, what one process takes: {"trainer": {"CPU": 4, "GPU": 1, "memory": 2**33}}, custom
    ones by their names; DEFAULTS for what is not said.
    """

    address: str = ""
    resources: Resources = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := ", ".join(sorted(self.resources.keys() - DEFAULTS.keys())):
            known = f"the roles are {', '.join(DEFAULTS)}"
            raise UsageError(f"resources names {unknown}, which is no role", rule="option", help=known)

    def open(self, run: Run) -> Engine:
        """Raises UsageError if Ray is not installed here, and ConnectionError if there is none at `address`."""
        if importlib.util.find_spec("ray") is None:
            raise UsageError("the engine ray needs the package ray", rule="engine", help="pip install graphft[ray]")
        from graphft.runtime.engines.ray_engine import RayEngine

        own, of_run = self.resources, run.resources
        resources = {role: {**usual, **of_run.get(role, {}), **own.get(role, {})} for role, usual in DEFAULTS.items()}
        return RayEngine(run, self.address, resources)
