"""What a pass comes to, summed up by a shard: exact under faults, for its sums are state that checkpoints have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from graphft.runtime.coordination.member import Member
from graphft.runtime.coordination.records import PassMetrics
from graphft.runtime.etcd import EtcdError
from graphft.runtime.protocol.round import Contribution

if TYPE_CHECKING:
    from graphft.plan import Plan


class PassSums:
    """`sums`: the shard's state: samples, and the sum over them of each value, by `names`. The first shard tells etcd
    of each pass that is over, as often as it finds itself at its end: the record is the same."""

    def __init__(self, member: Member, names: Sequence[str], sums: Tensor) -> None:
        self.member, self.names, self.sums = member, tuple(names), sums
        self._untold: dict[int, PassMetrics] = {}

    @property
    def _plan(self) -> Plan:
        return self.member.config.plan

    def add(self, step: int, contributions: Sequence[Contribution]) -> None:
        """Those of a step that is applied, in slot order; none if it is left out."""
        if self._plan.begins_pass(step):
            self.sums.zero_()
        for one in contributions:
            self.sums[0] += one.samples
            for i, value in enumerate(one.values, 1):
                self.sums[i] += value * one.samples
        self.reached(step + 1)

    def reached(self, step: int) -> None:
        """The shard is at this step: after one that was applied, or as it begins, or has gone back."""
        if self.member.index == 0 and step and self._plan.begins_pass(step):
            samples, *totals = self.sums.tolist()
            found = {n: t / samples if samples else math.nan for n, t in zip(self.names, totals, strict=True)}
            means = {n: mean if math.isfinite(mean) else str(mean) for n, mean in found.items()}
            self._untold[self._plan.pass_of(step) - 1] = PassMetrics(int(samples), means)
        self.tell()

    def tell(self) -> None:
        """To be called now and then, until etcd has taken all of it."""
        for index, metrics in list(self._untold.items()):
            try:
                self.member.etcd.put(self.member.keys.pass_metrics(index), msgspec.json.encode(metrics))
            except EtcdError:
                return
            del self._untold[index]
