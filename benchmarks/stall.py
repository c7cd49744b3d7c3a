"""Measures the cost of a checkpoint for its loop: `python benchmarks/stall.py [--millions 100] [--rounds 3]`.

A plain torch loop trains so many million parameters with Adam (three times as many values are saved), and takes one
checkpoint on the way: with graphft, in the foreground and beside the loop; with torch.save (fsynced); with
torch.distributed.checkpoint, `save` and `async_save`. All in turn, in each round, on the same disk.

Printed, as medians over the rounds: the seconds that the loop lost (of as many steps without a checkpoint), the
seconds until the checkpoint was whole on the disk, and the latter beside what the disk takes to be written the same
bytes, fsynced.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import graphft

WIDTH, BATCH, PIECE = 2048, 4, 8 << 20
BEFORE, LEAST_AFTER = 2, 4
"""Steps before the checkpoint is taken; and so many at least behind it, more while it is being written."""

State = dict[str, Any]
Take = Callable[[State, Path], Callable[[], bool]]
"""Begins to save; returns what tells whether it is done."""


class Loop:
    def __init__(self, millions: float) -> None:
        torch.manual_seed(0)
        layers = max(1, round(millions * 1e6 / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(BATCH, WIDTH)
        self.step()

    @property
    def bytes(self) -> int:
        return 3 * sum(p.nbytes for p in self.model.parameters())

    def step(self) -> float:
        """Its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def state(self) -> State:
        return {"model": self.model, "optimizer": self.optimizer}

    def run(self, take: Take, folder: Path, usual: float) -> tuple[float, float]:
        """Seconds that the loop lost, and until the checkpoint was whole."""
        for _ in range(BEFORE):
            self.step()
        start = time.perf_counter()
        done = take(self.state(), folder)
        whole = time.perf_counter() - start if done() else 0.0
        steps = 0
        while steps < LEAST_AFTER or not whole:
            self.step()
            steps += 1
            if not whole and done():
                whole = time.perf_counter() - start
        return time.perf_counter() - start - steps * usual, whole


def graphft_save(state: State, folder: Path) -> Callable[[], bool]:
    graphft.save_check_point(state, graphft.TrainStatus(0), str(folder))
    return lambda: True


def graphft_begin(state: State, folder: Path) -> Callable[[], bool]:
    saving = graphft.CheckPoints(str(folder)).begin(state, graphft.TrainStatus(0))
    return lambda: saving.done() and saving.result() is not None


def torch_save(state: State, folder: Path) -> Callable[[], bool]:
    folder.mkdir()
    with (folder / "checkpoint.pt").open("wb") as file:
        torch.save({name: value.state_dict() for name, value in state.items()}, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: True


def _plain(state: State) -> State:
    return {name: value.state_dict() for name, value in state.items()}


def dcp_save(state: State, folder: Path) -> Callable[[], bool]:
    dcp.save(_plain(state), checkpoint_id=folder)
    return lambda: True


def dcp_async_save(state: State, folder: Path) -> Callable[[], bool]:
    future = dcp.async_save(_plain(state), checkpoint_id=folder)

    def done() -> bool:
        if future.done():
            future.result()
        return bool(future.done())

    return done


WAYS: dict[str, Take] = {
    "graphft, save_check_point": graphft_save,
    "graphft, CheckPoints.begin": graphft_begin,
    "torch.save, fsynced": torch_save,
    "torch.distributed.checkpoint.save": dcp_save,
    "torch.distributed.checkpoint.async_save": dcp_async_save,
}


def disk_seconds(count: int, folder: Path) -> float:
    """Returns the seconds that the disk takes for so many bytes, fsynced."""
    piece = os.urandom(PIECE)
    start = time.perf_counter()
    with (folder / "plain").open("wb", buffering=0) as file:
        for _ in range(-(-count // PIECE)):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "plain").unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, default=100.0, help="of parameters")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="graphft-stall-") as scratch:
        root = Path(scratch)
        dist.init_process_group("gloo", init_method=f"file://{root / 'rendezvous'}", rank=0, world_size=1)
        loop, lost, whole, disk = Loop(options.millions), defaultdict(list), defaultdict(list), list[float]()
        usual = statistics.median(loop.step() for _ in range(8))
        print(f"{loop.bytes / 1e9:.2f} GB of parameters and optimizer state; a step takes {usual:.3f} s", flush=True)
        for number in range(options.rounds):
            disk.append(disk_seconds(loop.bytes, root))
            for name, take in WAYS.items():
                folder = root / f"{number}"
                usual = statistics.median(loop.step() for _ in range(5))
                seconds, until = loop.run(take, folder, usual)
                lost[name].append(seconds)
                whole[name].append(until)
                shutil.rmtree(folder)
            print(f"round {number + 1} of {options.rounds}", flush=True)
        dist.destroy_process_group()
    plain = statistics.median(disk)
    print(f"the disk itself: {plain:.2f} s, {loop.bytes / plain / 1e6:.0f} MB/s")
    print(f"{'saved by':40} {'loop lost':>10} {'whole after':>12} {'/ disk':>7}")
    for name in WAYS:
        until = statistics.median(whole[name])
        print(f"{name:40} {statistics.median(lost[name]):>8.2f} s {until:>10.2f} s {until / plain:>7.2f}")


if __name__ == "__main__":
    main()
