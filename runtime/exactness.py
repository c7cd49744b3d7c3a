"""What a job's bits depend on, beside its programs: recorded when it is transpiled, enforced when a role starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from graphft.errors import GraphftError

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig

log = logging.getLogger("graphft")


def enforce(config: JobConfig) -> None:
    """Sets this process's threads as the job says, and compares what else its bits depend on.

    Raises GraphftError[exactness] where this machine differs, or warns with `exact=False`.
    """
    torch.set_num_threads(config.threads)
    differences = [f"{what}: the job has {wanted}, here it is {found}" for what, wanted, found in (
        ("torch", config.torch_version, torch.__version__),
        ("CPU capability", config.cpu_capability, torch.backends.cpu.get_cpu_capability()),
    ) if wanted and wanted != found]
    if not differences:
        return
    text = "this process would not give the bits of the others: " + "; ".join(differences)
    if config.exact:
        raise GraphftError(text, rule="exactness",
                           help="use the same torch build (and ATEN_CPU_CAPABILITY) everywhere, or exact=False")
    log.warning("%s", text)
