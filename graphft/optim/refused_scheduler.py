"""What to write in place of a learning-rate scheduler of torch."""

from __future__ import annotations

from torch.optim.lr_scheduler import ReduceLROnPlateau

from graphft.errors import GraphftError

_SAME_CURVE = {
    "StepLR": "graphft.schedule.step(lr, step_size, gamma)",
    "ExponentialLR": "graphft.schedule.exponential(lr, gamma)",
    "CosineAnnealingLR": "graphft.schedule.cosine(lr, T_max, eta_min)",
    "LinearLR": "graphft.schedule.linear_warmup(lr, steps)",
}
_RECIPES = ("MultiStepLR", "PolynomialLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts", "SequentialLR")
"""Schedulers of torch whose curve docs/optimizers.md writes as a function of the step."""


def refused_scheduler(name: str, what: str) -> GraphftError:
    """The error for a scheduler of torch; `what` is wrong with it. The remedy is the schedule with the same curve."""
    curve = _SAME_CURVE.get(name, "graphft.schedule.cosine(1e-3, steps)")
    way = (
        f"give the schedule as lr, in graphft's optimizer: graphft.AdamW(lr={curve}), counted in steps of the job; "
        f'with parameter groups, in each of them: optimizer.param_groups[0]["lr"] = {curve}'
    )
    if name == ReduceLROnPlateau.__name__:
        way = "the steps of a job have no validation loss to follow: " + way
    elif name in _RECIPES:
        way += f"; docs/optimizers.md (Schedules) has the function that gives the curve of {name}"
    elif name not in _SAME_CURVE:
        way += "; any function of the step will do that uses torch functions: lr=lambda k: ..."
    return GraphftError(f"a torch.optim.lr_scheduler ({name}) {what}", rule="optimizer-option", help=way)
