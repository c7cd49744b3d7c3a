"""Where a training loop is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphft.errors import GraphftError
from graphft.runtime.loop.state_codec import Encoder, decode


@dataclass
class TrainStatus:
    """How far a loop has come; of the design "Fault tolerance for sync training", and what it left for later.

        status = graphft.load_check_point(state, path) or graphft.TrainStatus()
        for epoch in range(status.next(), epochs):
            ...

    Attributes:
        epoch_no: The last epoch that is complete; -1 before the first.
        step: Optimizer steps since the beginning of training.
        offset: Batches (or records: the loop decides) of the epoch `next()` that are done. 0 between epochs.
        metrics: Numbers by name: `keep` may hold on to the best checkpoint by one of them.
    """

    epoch_no: int = -1
    step: int = 0
    offset: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def next(self) -> int:
        """The epoch to go on with: the one that is not complete, from `offset` on."""
        return self.epoch_no + 1

    def to_json(self) -> dict[str, Any]:
        metrics = {name: Encoder().encode(float(value), name) for name, value in self.metrics.items()}
        return {"epoch_no": self.epoch_no, "step": self.step, "offset": self.offset, "metrics": metrics}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrainStatus:
        """Raises KeyError, TypeError or ValueError for what `to_json` did not give."""
        metrics = {str(name): float(decode(value, {})) for name, value in data["metrics"].items()}
        return TrainStatus(int(data["epoch_no"]), int(data["step"]), int(data["offset"]), metrics)

    def check(self) -> None:
        """Raises GraphftError[train-status] for what no loop can be at."""
        for name, least in (("epoch_no", -1), ("step", 0), ("offset", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise GraphftError(
                    f"TrainStatus.{name} is {value!r}; expected an int of {least} or more",
                    rule="train-status",
                    help="epoch_no counts complete epochs from 0 on, -1 before the first; step and offset count from 0",
                )
        for name, number in self.metrics.items():
            if type(name) is not str or isinstance(number, bool) or not isinstance(number, (int, float)):
                raise GraphftError(
                    f"TrainStatus.metrics has {name!r}: {number!r}; expected a number by name",
                    rule="train-status",
                    help="take a tensor's .item()",
                )


def check_status(status: Any) -> None:
    """Raises GraphftError[train-status] for what is none, and for one that no loop can be at."""
    if not isinstance(status, TrainStatus):
        raise GraphftError(
            f"the status is {status!r}, expected a TrainStatus", rule="train-status", help="graphft.TrainStatus(epoch)"
        )
    status.check()
