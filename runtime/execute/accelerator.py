"""The accelerator that a process computes on, and torch's settings for equal bits there."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphft.options import find_device

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

log = logging.getLogger("graphft")

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""cuBLAS reads this when it first computes; with it, equal calls give equal bits."""
_held: list[Any] = []
"""The open files whose locks this process holds to its end."""


def prepare(config: JobConfig) -> None:
    """Has torch compute with deterministic algorithms, and float32 as such unless the job asks for TF32."""
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=not config.exact)
    for op in ("matmul", "conv", "rnn"):
        torch._C._set_fp32_precision_setter("cuda", op, "tf32" if config.tf32 else "ieee")


def own_device(device: str, number: int) -> str:
    """Returns the device for process `number` of a role, which is the current one from now on.

    Of the kind `device`, one that no other process of graphft on this machine has, if there is one. A device with an
    index, and the CPU, are returned as they are. Raises UsageError[device] where there is none."""
    kind, count = torch.device(device), torch.accelerator.device_count()
    if kind.type != "cpu" and kind.index is None and count:
        kind = torch.device(kind.type, _free_index(kind.type, number, count))
    find_device(kind)  # the first use of one: no memory of another is taken
    if kind.type != "cpu":
        torch.accelerator.set_device_index(kind)
    return str(kind)


def _free_index(kind: str, number: int, count: int) -> int:
    for index in (shift % count for shift in range(number, number + count)):
        if _lock(f"graphft-{os.getuid()}-{_name(kind, index)}.lock"):
            log.info("computing on %s:%d, which no other process of graphft here has", kind, index)
            return index
    log.warning("other processes compute on each %s device here: %d is shared", kind, number % count)
    return number % count


def describe_device(device: str) -> str:
    """Returns the model of an accelerator; "" for the CPU."""
    kind = torch.device(device)
    return torch.cuda.get_device_name(kind) if kind.type == "cuda" else kind.type.removeprefix("cpu")


def _name(kind: str, index: int) -> str:
    """Names a device as it is known to all processes of a machine, whatever CUDA_VISIBLE_DEVICES they have."""
    return f"{kind}-{torch.cuda.get_device_properties(index).uuid}" if kind == "cuda" else f"{kind}-{index}"


def _lock(name: str) -> bool:
    try:
        file = Path(tempfile.gettempdir(), name).open("a")  # noqa: SIM115  (held until this process ends)
    except OSError:  # a full disk, or somebody else's
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _held.append(file)
    return True
