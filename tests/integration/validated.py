"""Jobs are validated with this while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import training  # beside this file
from torch import Tensor, nn

import graphft

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


def validation(pace: Path | str, **options: Any) -> graphft.Validation:
    data = graphft.dataset(f"{training.__file__}:Blobs", {"records": RECORDS, "pace": str(pace)}, chunk_size=CHUNK)
    return graphft.Validation(
        data=data, batch_size=BATCH, loss_fn=with_scores, reduce={"balanced": balanced}, **options
    )
