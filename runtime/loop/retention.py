"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphft.errors import UsageError


@dataclass(frozen=True, slots=True)
class Keep:
    """What is not deleted. The newest checkpoint never is.

    Attributes:
        newest: So many of the newest.
        every: And the first of each so many versions: 0, 10, 20 ... for 10 (where 20 is missing, 21); 0: none.
        best: And the one with the best value of this metric of `TrainStatus.metrics`; "": none.
        mode: "min" or "max": which value is the best.
    """

    newest: int = 3
    every: int = 0
    best: str = ""
    mode: str = "min"

    def __post_init__(self) -> None:
        if type(self.newest) is not int or self.newest < 1 or type(self.every) is not int or self.every < 0:
            raise UsageError(
                f"Keep(newest={self.newest!r}, every={self.every!r}): expected newest >= 1 and every >= 0",
                rule="keep",
                help="keep at least the newest checkpoint",
            )
        if self.mode not in ("min", "max"):
            raise UsageError(f"Keep(mode={self.mode!r}): expected 'min' or 'max'", rule="keep", help="see help(Keep)")

    def of(self, versions: Sequence[tuple[int, float | None]]) -> set[int]:
        """Those to keep, of (version, value of the metric `best`). None, and what is no number, is never the best."""
        known = sorted(versions, reverse=True)
        kept = {version for version, _ in known[: self.newest]}
        if self.every:
            kept |= set({version // self.every: version for version, _ in known}.values())
        sign = 1 if self.mode == "min" else -1
        values = [(sign * value, -version) for version, value in known if value is not None and not math.isnan(value)]
        return kept | ({-min(values)[1]} if values else set())


def as_keep(keep: int | Keep) -> Keep:
    """A number is that of the newest. Raises UsageError[keep]."""
    if isinstance(keep, int) and not isinstance(keep, bool):
        keep = Keep(newest=keep)
    if not isinstance(keep, Keep):
        raise UsageError(f"keep is {keep!r}; expected a number, or graphft.Keep(...)", rule="keep", help="keep=3")
    return keep
