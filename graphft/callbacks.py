"""Ready-made callbacks, for `graphft.Trainer(callbacks=[...])` and `job.run(callbacks=[...])`. See docs/trainer.md."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "CSVLogger": "csv_logger",
    "MLflow": "trackers",
    "Run": "callbacks",
    "TensorBoard": "trackers",
    "WandB": "trackers",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Each is loaded when it is first used, its library when it is first told something."""
    if name not in _HOME:
        raise AttributeError(f"module 'graphft.callbacks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"graphft.runtime.callbacks.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
