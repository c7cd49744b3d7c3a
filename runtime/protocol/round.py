"""The contributions of one step on one shard: named (slot, bucket) pairs, never counters."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from graphft.runtime.protocol.messages import Empty, Push


@dataclass(frozen=True, slots=True)
class Contribution:
    """Holds what a slot gives to a step: its number of samples, a payload per bucket, and the values it reports."""

    slot: int
    samples: int
    payloads: Mapping[int, Any]
    values: tuple[float, ...] = ()


def means_of(reports: Sequence[tuple[int, tuple[float, ...]]]) -> tuple[float, ...]:
    """Returns the means of values that were reported, each with its number of samples; of one report, its very own."""
    if len(reports) < 2:
        return reports[0][1] if reports else ()
    weights = [samples for samples, _ in reports]
    columns = zip(*(values for _, values in reports), strict=True)
    return tuple(sum(map(operator.mul, column, weights)) / sum(weights) for column in columns)


@dataclass(slots=True)
class _Partial:
    samples: int
    peer: str
    payloads: dict[int, Any] = field(default_factory=dict)
    empty: bool = False
    finite: bool = True
    values: tuple[float, ...] = ()


Outcome = Literal["kept", "duplicate", "conflict"]


class Round:
    """Step `step` while it is open. A slot is complete when all `buckets` are in, or it is empty."""

    def __init__(self, step: int, slots: int, buckets: tuple[int, ...]) -> None:
        self.step, self.slots, self.buckets = step, slots, buckets
        self._partial: dict[int, _Partial] = {}

    def keep(self, push: Push | Empty, payload: Any, peer: str) -> tuple[Outcome, str]:
        """Keeps the first copy of (slot, bucket). A conflict is another number of samples than before."""
        if isinstance(push, Empty):
            return self._keep_empty(push.slot, peer)
        part = self._partial.setdefault(push.slot, _Partial(push.samples, peer))
        where = f"bucket {push.bucket} of slot {push.slot} at step {self.step}"
        if part.empty:
            return "duplicate", f"slot {push.slot} is closed as empty at step {self.step}, by {part.peer}"
        if part.samples != push.samples:
            before = f"{part.samples} came with its other buckets from {part.peer}"
            return "conflict", f"{where} has {push.samples} samples, but {before}"
        if push.bucket in part.payloads:
            return "duplicate", f"{where} is here already, from {part.peer}"
        part.payloads[push.bucket] = payload
        part.finite = part.finite and push.finite
        part.values = push.values or part.values
        return "kept", f"kept {where} from {peer}"

    def _keep_empty(self, slot: int, peer: str) -> tuple[Outcome, str]:
        """Closes a slot as empty, unless it is complete; half a contribution is dropped, as its chunk was discarded."""
        part = self._partial.get(slot)
        if part is not None and (part.empty or len(part.payloads) == len(self.buckets)):
            return "duplicate", f"slot {slot} is complete at step {self.step} already, from {part.peer}"
        self._partial[slot] = _Partial(0, peer, empty=True)
        return "kept", f"slot {slot} is empty at step {self.step}, says {peer}"

    def missing(self) -> dict[int, tuple[int, ...]]:
        """Returns the slots that are not complete, with the buckets that they lack."""
        result = {}
        for slot in range(self.slots):
            part = self._partial.get(slot)
            if part is None:
                result[slot] = self.buckets
            elif not part.empty and len(part.payloads) < len(self.buckets):
                result[slot] = tuple(b for b in self.buckets if b not in part.payloads)
        return result

    @property
    def complete(self) -> bool:
        return len(self._partial) == self.slots and not self.missing()

    def nonfinite(self) -> tuple[int, ...]:
        """Returns the slots whose contributions are complete, but not finite, in order."""
        return tuple(c.slot for c in self.contributions() if not self._partial[c.slot].finite)

    def contributions(self) -> tuple[Contribution, ...]:
        """Returns the complete contributions with data, in slot order: the order of summation."""
        return tuple(
            Contribution(slot, part.samples, dict(part.payloads), part.values)
            for slot, part in sorted(self._partial.items())
            if not part.empty and len(part.payloads) == len(self.buckets)
        )


class PartialSums:
    """Partial sums by shard, and the own ones of the step before, for which a peer may still ask. None: the shard
    closed that step without data."""

    def __init__(self, shard: int, shards: int) -> None:
        self.shard, self.shards = shard, shards
        self.own: dict[int, Any] = {}
        self._others: dict[int, Any] = {}

    def offer(self, step: int, payload: Any) -> None:
        self.own[step] = payload

    def keep(self, shard: int, payload: Any) -> bool:
        """Keeps another shard's for the current step. False: they are here already."""
        if shard in self._others:
            return False
        self._others[shard] = payload
        return True

    def missing(self) -> tuple[int, ...]:
        return tuple(s for s in range(self.shards) if s != self.shard and s not in self._others)

    def ordered(self, step: int) -> tuple[Any, ...]:
        """Returns all partial sums of the step, in shard order."""
        return tuple(self.own[step] if s == self.shard else self._others[s] for s in range(self.shards))

    def advance(self, step: int) -> None:
        """Closes `step`: remembers its own sums, and forgets all others."""
        self.own = {step: self.own.get(step)}
        self._others = {}
