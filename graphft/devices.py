"""Where a program computes: whether this machine has the device."""

from __future__ import annotations

import socket

import torch

from graphft.errors import UsageError, describe


def find_device(device: str | torch.device) -> None:
    """Raises GraphftError[device] where there is no such device to compute on, and says which there are."""
    reason = "tensors there have no data" if str(device).startswith("meta") else ""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = describe(error).splitlines()[0]
    if reason:
        raise UsageError(
            f"the program is to compute on {device}, which {socket.gethostname()} does not have, or this torch "
            f"({torch.__version__}) does not support: {reason}",
            rule="device",
            help=f'here it can compute on {", ".join(found())}: transpile(..., device="{found()[-1]}"); or make the '
            "job on a machine that has it",
        )


def found() -> list[str]:
    """The devices of this machine that torch computes on, the CPU first."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if kind is not None else 0
    return ["cpu", *(f"{kind.type}:{index}" for index in range(count) if kind is not None)]
