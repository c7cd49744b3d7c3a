"""Which engine: by its name, or by what holds its options."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from graphft.errors import UsageError
from graphft.runtime.engines.base import Engine, Run

ENGINES = {
    "local": "local:Local",
    "ray": "ray:Ray",
    "slurm": "slurm:Slurm",
    "kubernetes": "kubernetes.engine:Kubernetes",
    "ssh": "ssh:Ssh",
}
"""By name, the file of this folder and the class in it that holds the engine's options (`Options`)."""


class Options(Protocol):
    """How an engine is to be used; a dataclass whose fields have defaults."""

    def open(self, run: Run) -> Engine:
        """Raises UsageError if it cannot be used here: what it needs is not installed, say."""


def engine_options(engine: str | Options) -> Options:
    """Of an engine that is named, its defaults. Raises UsageError for a name of none."""
    if not isinstance(engine, str):
        if isinstance(engine, type) or not callable(getattr(engine, "open", None)):
            raise UsageError(
                f"engine is {engine!r}, expected a name or an engine's options",
                rule="engine",
                help=f"it is one of {', '.join(ENGINES)}",
            )
        return engine
    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}", rule="engine", help=f"it is one of {', '.join(ENGINES)}")
    module, name = ENGINES[engine].split(":")
    return cast(Options, getattr(importlib.import_module(f"graphft.runtime.engines.{module}"), name)())
