"""What later checkpoints of a loop write, where not everything changes: `python benchmarks/deltas.py [--millions 50]`.

Each case trains a model of so many million parameters with SGD, one step between two checkpoints. Printed: the bytes of
the first checkpoint, the mean of those after it as a share of that, and the seconds of both, saved in the foreground.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import graphft

WIDTH, VERSIONS, TOKENS = 1024, 5, 256


class Words(nn.Module):
    """An embedding of whose rows a step touches a few, and a head."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        self.rows = round(millions * 1e6 / WIDTH)
        self.embedding = nn.Embedding(self.rows, WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x)).square().sum()


class Layers(nn.Module):
    """`frozen`: the share of the layers that is not trained."""

    def __init__(self, millions: float, frozen: float) -> None:
        super().__init__()
        count = max(2, round(millions * 1e6 / WIDTH**2))
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
        for layer in self.layers:
            nn.init.eye_(layer.weight)  # gradients do not vanish on the way
        for layer in self.layers[: round(frozen * count)]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


CASES: dict[str, Callable[[float], nn.Module]] = {
    "an embedding, 256 rows touched": Words,
    "nine layers of ten are frozen": lambda millions: Layers(millions, 0.9),
    "all is trained": lambda millions: Layers(millions, 0.0),
}


def batch_of(model: nn.Module) -> Tensor:
    return torch.randint(model.rows, (TOKENS,)) if isinstance(model, Words) else torch.randn(4, WIDTH)


def measure(model: nn.Module, folder: Path) -> tuple[list[int], list[float]]:
    """Of each version: the bytes that it wrote, and its seconds."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    sizes, seconds, place = list[int](), list[float](), graphft.CheckPoints(folder, keep=VERSIONS)
    for version in range(VERSIONS):
        optimizer.zero_grad()
        model(batch_of(model)).backward()
        optimizer.step()
        start = time.perf_counter()
        place.save({"model": model}, graphft.TrainStatus(version))
        seconds.append(time.perf_counter() - start)
        sizes.append(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) - sum(sizes))
    return sizes, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, default=50.0, help="of parameters")
    options = parser.parse_args()
    print(f"{'':34} {'first':>9} {'later':>7} {'first':>8} {'later':>8}")
    for name, make in CASES.items():
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="graphft-deltas-") as scratch:
            (first, *later), (start, *after) = measure(make(options.millions), Path(scratch))
        share, mean = statistics.mean(later) / first, statistics.median(after)
        print(f"{name:34} {first / 1e6:>6.0f} MB {100 * share:>5.1f} % {start:>6.2f} s {mean:>6.2f} s", flush=True)


if __name__ == "__main__":
    main()
