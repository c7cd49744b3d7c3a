"""Measures the cost of a stop between epochs: of a job whose passes follow one another, and of a Trainer.

Per epoch: the seconds of `job.run()` less those of its start, by two lengths; and the median of `train()`. Then what a
new start costs: the first epoch of a script, and the first after `load_state_dict`. In turn, ROUNDS times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import graphft

WIDTH, RECORDS, BATCH, CHUNK = 64, 5_120, 64, 512
OPTIONS: dict[str, Any] = {"pservers": 2, "batch_size": BATCH, "checkpoint_every": 0}
STEPS = RECORDS // (2 * BATCH)


def make() -> tuple[graphft.Program, graphft.DataSpec]:
    torch.manual_seed(0)
    x = torch.randn(RECORDS, WIDTH)
    layers = torch.nn.Linear(WIDTH, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 2))
    program = graphft.build(model, loss_fn, inputs={"x": (None, WIDTH), "y": ((None,), torch.int64)})
    graphft.minimize(program, graphft.Adam(lr=1e-3))
    return program, graphft.arrays(x=x, y=(x.sum(1) > 0).long(), chunk_size=CHUNK)


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), y)


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def of_a_job(folder: Path, epochs: int) -> float:
    """Seconds per pass."""
    program, data = make()

    def run(passes: int) -> float:
        job = graphft.transpile(program, trainers=2, ft=True, data=data, epochs=passes, **OPTIONS)
        return seconds(lambda: job.run(job_dir=str(folder / f"{passes}"), quiet=True))

    return (run(epochs + 2) - run(2)) / epochs


def of_a_trainer(folder: Path, epochs: int, checkpoint: Any) -> tuple[float, float, float]:
    """Seconds of an epoch (median), of the first one, and of the first one after `load_state_dict`."""
    program, data = make()
    with graphft.Trainer(program, num_workers=2, data=data, job_dir=str(folder), quiet=True, **OPTIONS) as trainer:
        first = seconds(trainer.train)
        found = [seconds(lambda: trainer.train(checkpoint=checkpoint)) for _ in range(epochs)]
        state = trainer.state_dict()
        again = seconds(lambda: (trainer.load_state_dict(state), trainer.train()))
    return statistics.median(found), first, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()
    print(
        f"an epoch of {STEPS} steps, {RECORDS:,} records, 25,000 parameters with Adam, 2 workers, 2 pservers; seconds"
    )
    print("job.run()   train()     train(checkpoint=None)   first epoch   after load_state_dict")
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            job = of_a_job(Path(folder) / "job", options.epochs)
            saved, first, again = of_a_trainer(Path(folder) / "saved", options.epochs, "auto")
            beside, _, _ = of_a_trainer(Path(folder) / "beside", options.epochs, None)
        print(f"{job:<12.3f}{saved:<12.3f}{beside:<25.3f}{first:<14.2f}{again:.2f}", flush=True)


if __name__ == "__main__":
    main()
