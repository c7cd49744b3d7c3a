"""Settings that a job's bits depend on: recorded when it is transpiled, enforced when a role starts.

No such list is whole: a process proves that it gives the job's bits (`roles/proof.py`). What is compared here gives
the clearer error, before anything is computed.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graphft.errors import UsageError
from graphft.runtime.execute.accelerator import describe_device, prepare

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

log = logging.getLogger("graphft")

ONEDNN_ISA = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's vector units, which ATEN_CPU_CAPABILITY does not limit. It reads this when it first computes."""
SETTINGS_CHANGED = "settings-changed"
"""Rule of the error when user code changes, while it runs, what a whole process computes with."""
_OF_LIBRARIES = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")

_MULTIPLY = {
    f"torch.backends.{module}.{op}.fp32_precision": (backend, op)
    for module, backend, ops in (
        ("mkldnn", "mkldnn", ("matmul", "conv", "rnn")),
        ("cuda", "cuda", ("matmul",)),
        ("cudnn", "cuda", ("conv", "rnn")),
    )
    for op in ops
}
_SWITCHES = {"mkldnn.deterministic": torch._C._get_mkldnn_deterministic, "nnpack": torch._C._get_nnpack_enabled}
_DENORMAL, _ONE = 1e-310, 1.0
"""Variables, so that the CPU multiplies, not Python's compiler."""


def enforce(config: JobConfig) -> None:
    """Sets this process's threads and oneDNN's vector units as the job says, and compares what cannot be set any more.
    Datasets are read in the folder, and with the arguments (sys.argv), of the script that described them.

    Before anything is computed. Raises GraphftError[determinism] where this machine differs; `exact=False`: warns.
    """
    for spec in (config.data, *([config.validate.data] if config.validate else [])):
        if spec.kind == "dataset":
            sys.argv = [*spec.source["argv"]]
            if os.path.isdir(spec.source["folder"]):  # as it may not be on another machine
                os.chdir(spec.source["folder"])
    torch.set_num_threads(config.threads)
    os.environ.pop("DNNL_" + ONEDNN_ISA.partition("_")[2], None)  # its older name
    os.environ[ONEDNN_ISA] = config.onednn_isa or "DEFAULT"
    if config.device != "cpu":
        prepare(config)
    differences = [
        f"{what}: the job has {wanted}, here it is {found}"
        for what, wanted, found in (
            ("torch", config.torch_version, torch.__version__),
            ("CPU capability", config.cpu_capability, torch.backends.cpu.get_cpu_capability()),
        )
        if wanted and wanted != found
    ]
    if not differences:
        return
    text = "this process would not give the bits of the others: " + "; ".join(differences)
    if config.exact:
        raise UsageError(
            text,
            rule="determinism",
            help="use the same torch build (and ATEN_CPU_CAPABILITY) everywhere, or exact=False (for a "
            'run that has begun: "exact": false in the job.json of its folder)',
        )
    log.warning("%s", text)


def process_settings() -> dict[str, object]:
    """The settings that decide over the bits of everything that this process computes, and can change at any time."""
    return {
        "torch.set_num_threads": torch.get_num_threads(),
        "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled(),
        **_precisions(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_flush_denormal": _denormals_flushed(),
        **{f"torch.backends.{name}": getter() for name, getter in _SWITCHES.items()},
    }


def thread_settings() -> dict[str, object]:
    """The same, of each thread."""
    return {
        "torch.autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "modes (torch.set_default_device, for one)": (
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        ),
    }


def _precisions() -> dict[str, object]:
    """In which precision float32 is multiplied; `torch.set_float32_matmul_precision` sets these, too."""
    return {name: torch._C._get_fp32_precision_getter(*place) for name, place in _MULTIPLY.items()}


def _denormals_flushed() -> bool:
    return _DENORMAL * _ONE == 0.0


def settings(device: str = "cpu", environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The known settings that decide over the bits of a process that computes on `device`: for people to look at, where
    bits differ."""
    found = {
        "torch": str(torch.__version__),
        "CPU": _cpu(),
        "device": describe_device(device) or "CPU",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **{name: str(value) for name, value in _precisions().items()},
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()),
        "order of sets": f"of PYTHONHASHSEED={environ.get('PYTHONHASHSEED', 'random')}",
        "denormals": "flushed" if _denormals_flushed() else "kept",
    }
    return found | {name: value for name, value in environ.items() if name.startswith(_OF_LIBRARIES)}


def _cpu() -> str:
    """The CPU's model, as the kernel tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
