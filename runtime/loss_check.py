"""Finds out whether the loss is a mean over the records of a batch, each with its own label, by computing it.

A job averages the gradients of batches by their numbers of records, so a sum over the batch trains with another rate,
and `model(x) - y` of [batch, 1] and [batch] trains each record against the labels of all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from graphft.capture.model import Origin
from graphft.capture.module_step import ModuleStep, unchanged

log = logging.getLogger("graphft")

RECORDS = 4
CLOSE, EQUAL = 1e-3, 1e-5
"""Relative differences below CLOSE are those of one sum; below EQUAL there is no difference."""


def tell_of_loss(origin: Origin, feed: Mapping[str, Tensor]) -> None:
    """Warns of a loss, or a metric, that grows with each copy of a batch by the same amount: a sum; and of a loss that
    is the same whichever record has which entry of an input [batch].

    Computed of a few records, in eval mode. A module that fails on them is passed over.
    """
    if any(not v.shape or isinstance(v.shape[0], int) for v in (origin.program.variables[n] for n in feed)):
        return
    few = {name: value[:RECORDS] for name, value in feed.items()}
    step = ModuleStep(origin.model, origin.whole_loss_fn(), training=False, seeds=False)

    def numbers(batch: Mapping[str, Tensor]) -> dict[str, float]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return {n: t.double().item() for n, t in step.run({}, batch)[0].items() if t.dim() == 0}

    with unchanged(origin.model):
        try:
            once = numbers(few)
            twice, thrice = (numbers({n: torch.cat([t] * k) for n, t in few.items()}) for k in (2, 3))
            same = [n for n in few if len(few) > 1 and few[n].dim() == 1 and _unpaired(few, n, once["loss"], numbers)]
        except Exception:  # the module is compared with the program on whole batches, which tells of it
            return
    for name, value in once.items():
        more = twice[name] - value
        if abs(more) > CLOSE * abs(value) and abs(thrice[name] - twice[name] - more) < CLOSE * abs(more):
            log.warning(_SUM if name == "loss" else _METRIC, name)
    for name in same:
        log.warning(_PAIRS, name)


def _unpaired(
    few: Mapping[str, Tensor], name: str, loss: float, numbers: Callable[[Mapping[str, Tensor]], dict[str, float]]
) -> bool:
    """True if the loss depends on the entries of this input, but not on which record has which."""
    rolled, constant = few[name].roll(1), few[name][:1].expand_as(few[name])
    moved, changed = (numbers({**few, name: value})["loss"] for value in (rolled, constant))
    return abs(moved - loss) <= EQUAL * abs(loss) and abs(changed - loss) > CLOSE * abs(loss)


_SUM = (
    "the %s is a sum over the batch; expected the mean over its samples: its gradients are batch_size times as large, "
    "and smaller where the last batch is; write reduction='mean', .mean(), or divide by x.shape[0]"
)
_METRIC = (
    "metric '%s' is a sum over the batch: what is told of steps and epochs is the mean of such sums; return a mean "
    "over the samples"
)
_PAIRS = (
    "the loss is the same whichever record of the batch has which %s: [batch, 1] with [batch] computes each record "
    "with each other one; write squeeze(-1) for the one, or unsqueeze(-1) for the other"
)
