"""What Ray Train's configurations say, read by the names of their fields: Ray itself is not needed for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from graphft.errors import UsageError

_SCALING = {"num_workers", "resources_per_worker", "use_gpu"}
_RUN = {"name", "storage_path", "failure_config", "checkpoint_config"}
_CHECKPOINT = {"num_to_keep"}
_FAILURE = {"max_failures"}


def scaling_options(config: Any) -> dict[str, Any]:
    """`num_workers`, `resources` and `device` of a ScalingConfig."""
    _check(config, "ScalingConfig", _SCALING)
    found: dict[str, Any] = {"num_workers": config.num_workers}
    resources = dict(getattr(config, "resources_per_worker", None) or {})
    if getattr(config, "use_gpu", False):
        resources.setdefault("GPU", 1)
        found["device"] = "cuda"
    if resources:
        found["resources"] = {"trainer": resources}
    return found


def run_options(config: Any) -> dict[str, Any]:
    """`name`, `storage`, `max_retries` and `keep_checkpoints` of a RunConfig."""
    _check(config, "RunConfig", _RUN)
    found: dict[str, Any] = {}
    name, path = getattr(config, "name", None), getattr(config, "storage_path", None)
    if name:
        found["name"] = name
    if path:
        if not name:
            raise UsageError(
                "RunConfig has a storage_path and no name: the run's folder in there is called by it",
                rule="option",
                help="RunConfig(name=..., storage_path=...)",
            )
        found["storage"] = f"{path if '://' in str(path) else f'file://{path}'}".rstrip("/") + f"/{name}"
    failure = getattr(config, "failure_config", None)
    if failure is not None:
        _check(failure, "FailureConfig", _FAILURE)
        found["max_retries"] = failure.max_failures
    checkpoint = getattr(config, "checkpoint_config", None)
    if checkpoint is not None:
        _check(checkpoint, "CheckpointConfig", _CHECKPOINT)
        if checkpoint.num_to_keep is not None:
            found["keep_checkpoints"] = checkpoint.num_to_keep
    return found


def _check(config: Any, kind: str, known: set[str]) -> None:
    """Raises UsageError for what is no configuration, and for a field that is set and means nothing here: what was
    asked for is not lost silently."""
    if isinstance(config, type | dict) or not hasattr(config, "__dict__"):
        raise UsageError(
            f"{config!r} is no {kind}", rule="option", help=f"give a {kind} of ray.train, or an object with its fields"
        )
    for name, value in _fields(config).items():
        default = _default(config, name)
        if name not in known and not name.startswith("_") and value != default and value not in (None, False, {}, []):
            raise UsageError(
                f"{kind} has {name}={value!r}, which graphft.Trainer does not know",
                rule="option",
                help=f"leave it out; of a {kind} it takes {', '.join(sorted(known))}",
            )


def _fields(config: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(config):
        return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return vars(config)


def _default(config: Any, name: str) -> Any:
    """Ray sets some fields itself when they are left out: what a new configuration has is no wish of the user's."""
    try:
        return getattr(type(config)(), name, None)
    except Exception:  # it cannot be made without arguments: then any value counts
        return None
