"""Finds a loss (or a metric) that is a sum over the batch, where a job expects the mean over its samples.

Its gradients are batch_size times those of the mean, and differ with the size of the last batch. From the loss
backwards, only linear ops are followed: a sum that something divides, before or afterwards, is no concern.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from graphft import registry
from graphft.ir import Arg, Kind, Operator, Program, refs
from graphft.literals import names_in

log = logging.getLogger(__name__)

_SUM = 2
"""torch's number for reduction="sum", in the schemas of its losses."""
_PRODUCTS = frozenset({"mul", "mul_"})
_QUOTIENTS = frozenset({"div", "div_"})
_ELEMENTWISE = ("add", "add_", "sub", "sub_", "rsub", "neg", "clone", "alias", "detach", "_to_copy")
_SHAPING = ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "select")
_LINEAR = frozenset({*_ELEMENTWISE, *_SHAPING, "stack", "cat", "sum", "mean"})
"""Ops whose result grows as their operands do. So does a product of which only one factor is no constant."""


def warn_of_sums(program: Program) -> None:
    """A warning with the ops that sum the loss over the batch: the leading named dimension of an input; and one for
    each metric that is such a sum."""
    sizes = [v.type.shape[0] for v in program.of_kind(Kind.INPUT) if v.type.shape]
    search = _Search(program, {size for size in sizes if isinstance(size, str)})
    for name in program.attrs.get("extras", ()):
        if not program.variables[name].type.shape and (summed := list(search.sums(name))):
            log.warning(
                "%s: metric '%s' is a sum over the batch, by %s: what is told of steps and epochs is the mean of such "
                "sums; return a mean over the samples",
                summed[0].loc or "loss_fn",
                name,
                summed[0].type,
            )
    found = list(search.sums(str(program.attrs["loss"])))
    if found:
        more = f" (and {len(found) - 1} more)" * (len(found) > 1)
        log.warning(
            "%s: the loss is a sum over the batch, by %s%s; expected the mean over its samples: its gradients are "
            "batch_size times as large, and smaller where the last batch is; write reduction='mean', .mean(), or "
            "divide by x.shape[0]",
            found[0].loc or "loss_fn",
            found[0].type,
            more,
        )


class _Search:
    """What block `step` of `program` computes the loss from. `batch`: the dimensions that count the samples."""

    def __init__(self, program: Program, batch: set[str]) -> None:
        self.program, self.batch = program, batch
        self.producer = {name: op for op in reversed(program.blocks["step"].ops) for name in op.writes}

    def sums(self, name: str) -> Iterator[Operator]:
        """The ops over whose sum the loss (or a metric) is linear, each once, from it backwards."""
        for op in self._backwards([name], self._linear):
            operands = self._operands(op)
            if self._is_sum(op) and not any(map(self._divides, self._backwards(operands, self._factors))):
                yield op

    def _backwards(self, names: Sequence[str], follow: Callable[[Operator], Sequence[str]]) -> Iterator[Operator]:
        """The ops that compute `names`, and those that compute what `follow` gives of each, each once."""
        waiting, seen = list(names), set[int]()
        while waiting:
            op = self.producer.get(waiting.pop())
            if op is not None and id(op) not in seen:
                seen.add(id(op))
                yield op
                waiting += follow(op)

    def _operands(self, op: Operator) -> list[str]:
        return [ref.name for ref in refs(op.args)]

    def _linear(self, op: Operator) -> list[str]:
        """The operands that the result of `op` grows with, as the loss does with its gradients; none behind a sum."""
        operands = self._operands(op)
        if _stem(op) in _PRODUCTS:
            varying = [n for n in operands if self.program.variables[n].kind not in (Kind.CONST, Kind.FROZEN)]
            return varying if len(varying) == 1 else []
        return [] if self._is_sum(op) or _stem(op) not in _LINEAR or self._reduces(op) else operands

    def _factors(self, op: Operator) -> list[str]:
        """Operands behind which a division by the number of samples may be, before they are summed."""
        return self._operands(op) if _stem(op) in _LINEAR | _PRODUCTS | _QUOTIENTS else []

    def _divides(self, op: Operator) -> bool:
        """Whether `op` divides by one number for the whole batch, or multiplies by one: its size, a sum of weights."""
        operands = self._operands(op)
        if _stem(op) in _PRODUCTS:
            return any(self.program.variables[n].type.shape is None for n in operands)
        return _stem(op) in _QUOTIENTS and len(operands) > 1 and not self._has_batch(operands[-1])

    def _is_sum(self, op: Operator) -> bool:
        if _stem(op) == "sum":
            return self._reduces(op)
        return _given(op, "reduction") == _SUM and any(map(self._has_batch, self._operands(op)))

    def _reduces(self, op: Operator) -> bool:
        """Whether a sum or mean is over dimensions that hold the batch."""
        if _stem(op) not in ("sum", "mean"):
            return False
        shape, axes = self.program.variables[self._operands(op)[0]].type.shape or (), _given(op, "dim")
        chosen = [shape[axis] for axis in axes] if isinstance(axes, tuple) and axes else shape
        return any(names_in(size) & self.batch for size in chosen)

    def _has_batch(self, name: str) -> bool:
        return any(names_in(size) & self.batch for size in self.program.variables[name].type.shape or ())


def _given(op: Operator, name: str) -> Arg:
    """The argument that torch's schema of `op` calls `name`; None if there is none."""
    definition = registry.get(op.type)
    schema = getattr(definition.kernel, "_schema", None) if definition is not None else None
    names = [a.name for a in schema.arguments] if schema is not None else []
    return dict(zip(names, op.args, strict=False)).get(name)


def _stem(op: Operator) -> str:
    """`sum` of `aten.sum.dim_IntList`."""
    return op.type.split(".")[1] if op.type.startswith("aten.") else ""
