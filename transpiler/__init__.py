"""From one program to one program per role. Reading order: `api`, `job`, `passes`, `layout`, `rules`, `assemble`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphft.transpiler.api import transpile
    from graphft.transpiler.config import JobConfig
    from graphft.transpiler.job import Job
    from graphft.transpiler.passes import pipeline
    from graphft.transpiler.programs import Programs, Stage, run_passes
    from graphft.transpiler.record import JobRecord, read_record

_HOME = {
    "transpile": "api",
    "JobConfig": "config",
    "Job": "job",
    "pipeline": "passes",
    "Programs": "programs",
    "Stage": "programs",
    "run_passes": "programs",
    "JobRecord": "record",
    "read_record": "record",
}

__all__ = ["Job", "JobConfig", "JobRecord", "Programs", "Stage", "pipeline", "read_record", "run_passes", "transpile"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: a launcher needs a job's record, and not torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'graphft.transpiler' has no attribute {name!r}")
    return getattr(importlib.import_module(f"graphft.transpiler.{_HOME[name]}"), name)
