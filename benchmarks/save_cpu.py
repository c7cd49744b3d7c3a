"""Measures the CPU time of a save, beside no loop: `python benchmarks/save_cpu.py [--millions 302] [--rounds 3]`.

So many million float32 values are saved, with `save_check_point` and with `CheckPoints.begin`, in turn. Printed, as
medians over the rounds: the seconds until the call returned, until the checkpoint was whole on the disk, and the CPU's
seconds (user and system) of the process until then. The latter are what a loop on busy cores loses at least, and say
the same on a machine that does something else meanwhile.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import graphft

WIDTH = 2048


class Values:
    def __init__(self, millions: float) -> None:
        self.tensors = {f"w{i}": torch.randn(WIDTH, WIDTH) for i in range(round(millions * 1e6 / WIDTH**2))}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.tensors = state_dict


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def save(way: str, values: Values, folder: Path) -> tuple[float, float, float]:
    place, before, start = graphft.CheckPoints(folder), cpu(), time.perf_counter()
    saving = getattr(place, way)({"values": values}, graphft.TrainStatus(0))
    returned = time.perf_counter() - start
    if way == "begin":
        saving.result()
    return returned, time.perf_counter() - start, cpu() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, default=302.0, help="of float32 values")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    values = Values(options.millions)
    found: dict[str, list[tuple[float, float, float]]] = {"save": [], "begin": []}
    for _ in range(options.rounds):
        for way, times in found.items():
            with tempfile.TemporaryDirectory(prefix="graphft-save-") as folder:
                times.append(save(way, values, Path(folder, "run")))
    print(f"{sum(t.nbytes for t in values.tensors.values()) / 1e9:.2f} GB    returned      whole   CPU")
    for way, times in found.items():
        returned, whole, used = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{way:8} {returned:>10.2f} s {whole:>8.2f} s {used:>5.2f} s")


if __name__ == "__main__":
    main()
