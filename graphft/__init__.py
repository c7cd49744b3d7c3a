"""A dataflow-graph runtime for PyTorch models whose fault tolerance is in the graph. See docs/design.md."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "graphft.capture.backward": ("append_backward",),
    "graphft.capture.model": ("build",),
    "graphft.data": ("DataSpec", "arrays", "dataset", "files"),
    "graphft.ir.parser": ("parse",),
    "graphft.ir": ("Block", "Kind", "Operator", "Program", "Ref", "Sym", "Type", "Variable", "grad_name"),
    "graphft.errors": ("GraphftError", "ProgramError"),
    "graphft.optim.grad_scaler": ("GradScaler",),
    "graphft.optim.optimizers": ("SGD", "Adagrad", "Adam", "AdamW", "ClipByGlobalNorm", "ClipByValue", "RMSprop"),
    "graphft.ir.storage": ("load_program", "save_program"),
    "graphft.optim.training": ("minimize",),
    "graphft.transpiler.criteria": ("Criterion", "EarlyStopping", "ReduceLROnPlateau"),
    "graphft.transpiler.validation": ("Validation",),
    "graphft.capture.weights": ("load_into", "load_weights", "save_weights", "state_dict"),
    "graphft.transpiler.api": ("transpile",),
    "graphft.transpiler.config": ("JobConfig",),
    "graphft.transpiler.job": ("Job",),
    "graphft.runtime.capture_check": ("check_capture", "check_on_data"),
    "graphft.runtime.driver.trainer": ("Trainer",),
    "graphft.runtime.driver.running_job": ("WorkerFailed",),
    "graphft.runtime.executor": ("Executor",),
    "graphft.runtime.fs": ("FS", "FsspecFS", "LocalFS"),
    "graphft.runtime.interchange.training_state": ("load_optimizer",),
    "graphft.runtime.interchange.weights": ("read_weights",),
    "graphft.runtime.launcher.launch": ("run_job",),
    "graphft.runtime.launcher.result": ("Result",),
    "graphft.runtime.loop.check_points": ("CheckPoints", "load_check_point", "read_check_point", "save_check_point"),
    "graphft.runtime.loop.snapshot": ("PerRank", "TrainStatus"),
    "graphft.runtime.etcd": ("EmbeddedEtcd",),
    "graphft.runtime.prediction.predict": ("predict",),
    "graphft.runtime.queue.task_loop": ("LoopTask", "TaskLoop"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
_HOME |= {name: f"graphft.{name}" for name in ("callbacks", "reducers", "schedule")}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used: `import graphft` alone does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'graphft' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if _HOME[name] == f"graphft.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
