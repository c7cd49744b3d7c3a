"""What batches come to: sums of means, and what has an entry for each record; and of all ranges, what is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graphft.capture.loss_results import reported
from graphft.ir import Program
from graphft.reducers import all_name
from graphft.runtime.execute.lowering import lower
from graphft.transpiler.evaluation import results_of


def means_of(program: Program) -> tuple[str, ...]:
    """The results of a batch that are means over its records."""
    return tuple(name for name in reported(program) if not program.variables[name].type.shape)


@dataclass
class RangeResults:
    """The sums of the batches of a range so far, in their order: so it has the same bits whoever computes it."""

    program: Program
    samples: int = 0
    batches: int = 0
    sums: list[float] = field(default_factory=list)
    entries: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, samples: int, results: Sequence[Tensor]) -> None:
        """`results`: of a batch, in the program's order."""
        found = dict(zip(reported(self.program), results, strict=True))
        means = [float(found.pop(name)) for name in means_of(self.program)]
        before = self.sums or [0.0] * len(means)
        self.sums = [total + mean * samples for total, mean in zip(before, means, strict=True)]
        for name, value in found.items():
            self.entries.setdefault(name, []).append(value.detach().cpu().clone())
        self.samples, self.batches = self.samples + samples, self.batches + 1


def named(program: Program, means: Sequence[float], entries: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns what a validation comes to, by name: the means, then what block `reduce` makes of all entries."""
    found = dict(zip(means_of(program), means, strict=True))
    block = program.blocks.get("reduce")
    if block is None:
        return found
    scope = dict(program.values) | {all_name(name): value for name, value in entries.items()}
    names = results_of(program)[len(found) :]
    reduced = lower(block, fetch=names)(None, scope)
    return found | {name: float(value) for name, value in zip(names, reduced, strict=True)}
