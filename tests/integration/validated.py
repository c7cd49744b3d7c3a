"""A user's script: a job that is validated while it trains. Arguments: the files that pace training and validation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import training  # beside this file
from torch import Tensor, nn

import graphft
from graphft.callbacks import CSVLogger

RECORDS, CHUNK, BATCH = 230, 60, 7
"""Held out: chunks of 9 batches, the last of which has 4 records, are two ranges each; one of 50 records is one."""


def with_scores(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    more = {"accuracy": (out.argmax(1) == y).float().mean(), "best": out.argmax(1), "labels": y}
    return nn.functional.cross_entropy(out, y), more


def balanced(best: Tensor, labels: Tensor) -> Tensor:
    """The mean over the classes of the share that is right."""
    right = (best == labels).double()
    shares = [(right * (labels == c)).sum() / (labels == c).sum() for c in range(3)]
    return sum(shares[1:], shares[0]) / 3


class Truncated(training.Blobs):
    """A file in it cannot be opened, ever: no storage that is away, though it is told like that."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i == 31:
            raise OSError(f"image file {i} is truncated")
        return super().__getitem__(i)


def validation(pace: Path | str, opening: str = "", **options: Any) -> graphft.Validation:
    blobs = {"records": RECORDS, "pace": str(pace), "opening": opening}
    data = graphft.dataset(f"{training.__file__}:Blobs", blobs, chunk_size=CHUNK)
    return graphft.Validation(
        data=data, batch_size=BATCH, loss_fn=with_scores, reduce={"balanced": balanced}, **options
    )


if __name__ == "__main__":
    pace, slow = map(Path, sys.argv[1:3])
    job = training.job(training.program(), pace=pace, validate=validation(slow, every=13), name="validated")
    result = job.run(callbacks=[CSVLogger()], quiet=True)
    print(f"validations: {len(result.validations)}")
