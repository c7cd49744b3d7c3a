"""The check that a trainer's contribution is finite; if it is not, what is known of the cause, for people.

The cost is one sum per bucket, of the frame that was packed a moment ago and is still in the processor's cache: a sum
is finite only if all of its terms are. Finite terms may have an infinite sum; so that is confirmed value by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graphft.errors import LISTED, UsageError, listed
from graphft.ir import Kind, Program, refs
from graphft.runtime.execute.finite import in_words, is_finite, nonfinite_of, nonfinite_rows
from graphft.transpiler.layout import gradient_of

RULE = "nonfinite"


class NonFinite(UsageError):
    """The error that stops the job: training would go on with values that are not finite."""


@dataclass(eq=False)
class FiniteCheck:
    """The contribution at hand. Used by the trainer's main thread, and begun anew with each contribution."""

    program: Program
    scope: Mapping[str, Tensor]
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The batch that was read last."""
    numbers: Callable[[], Sequence[int]] = tuple
    """Returns the numbers of its records in the data."""
    names: Callable[[Sequence[int]], list[str]] = list  # type: ignore[assignment]
    """Returns what a person finds records of the data by."""
    loss: float | None = None
    gradients: dict[str, int] = field(default_factory=dict)
    """By parameter, how many values of its gradient are not finite."""
    inputs: dict[str, int] = field(default_factory=dict)
    """By column, how many values are not finite, of the batch that was at hand then."""
    records: list[int] = field(default_factory=list)
    """The records of the data that these values are of."""
    told: int = 0

    def __post_init__(self) -> None:
        self._parameter = {gradient_of(v): v.name for v in self.program.of_kind(Kind.PARAM)}
        self._operands = {
            (op.attrs["shard"], op.attrs["bucket"]): [ref.name for ref in refs(op.args)]
            for op in self.program.blocks["step"].ops
            if op.type == "send"
        }

    @property
    def finite(self) -> bool:
        return self.loss is None and not self.gradients

    def begin(self) -> None:
        self.loss, self.gradients, self.inputs, self.records = None, {}, {}, []

    def look_at_loss(self, loss: Tensor) -> None:
        value = loss.item()
        if self.loss is None and not math.isfinite(value):
            self.loss = value
            self._look_at_columns()

    def look_at_bucket(self, shard: int, bucket: int, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """`values`: the bucket's, flat; `tensors`: the gradients that it has slices of."""
        if is_finite(values):
            return
        names = [self._parameter.get(n, n) for n in self._operands[shard, bucket]]
        self.gradients |= nonfinite_of(dict(zip(names, tensors, strict=True)))
        self._look_at_columns()

    def _look_at_columns(self) -> None:
        if not self.inputs and (found := nonfinite_of(self.columns)):
            rows = sorted({row for name in found for row in nonfinite_rows(self.columns[name])})
            numbers = self.numbers()
            self.inputs, self.records = found, sorted(numbers[row] for row in rows if row < len(numbers))

    def describe(self) -> str:
        """Says what is not finite, and what is known of the cause."""
        parts = [f"the loss is {self.loss}"] if self.loss is not None else []
        if self.gradients:
            parts.append(f"the gradients of {in_words(self.gradients)} are not finite")
        parameters = (v.name for v in self.program.of_kind(Kind.PARAM, Kind.FROZEN))
        already = nonfinite_of({n: self.scope[n] for n in parameters if n in self.scope})
        if self.inputs:
            names = self.names(self.records[:LISTED])
            of = f", of {listed(names, total=len(self.records))}" if self.records else ""
            parts.append(f"the batch itself holds such values in column {in_words(self.inputs)}{of}")
        elif already:
            parts.append(
                f"so are parameters before this step: {in_words(already)}: by an update before, or from the start"
            )
        else:
            parts.append("the batch and the parameters before this step are finite")
        return "; ".join(parts)

    def worth_telling(self) -> bool:
        """True the 1st, 2nd, 4th, 8th ... time."""
        self.told += 1
        return self.told & (self.told - 1) == 0
