"""Ready-made callbacks, for `graphft.Trainer(callbacks=[...])` and `job.run(callbacks=[...])`. See docs/trainer.md."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["CSVLogger", "MLflow", "Run", "TensorBoard", "WandB"]  # noqa: F822  (they are loaded when first used)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'graphft.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module("graphft.runtime.callbacks.trackers"), name)
