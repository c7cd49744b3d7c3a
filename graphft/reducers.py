"""Results of a validation that need all of its records at once: an area under a curve, for one.

    def with_scores(model, x, y):
        scores = model(x)
        return binary_cross_entropy_with_logits(scores, y), {"scores": scores, "labels": y}

    graphft.Validation(data=held_out, loss_fn=with_scores, reduce={"auc": graphft.reducers.auc})

A reducer's parameters are tensors of all records, named like what `loss_fn` returns of each batch. It is captured as a
model is: block `reduce` computes it of inputs `<entry>@ALL`, which hold an entry for each record, in the order of the
data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphft.capture.guards import assumptions, captured
from graphft.capture.loss_fn import shown
from graphft.capture.tracing import emit, trace
from graphft.errors import GraphftError, UsageError
from graphft.ir import Kind, Program, Type, Variable, registry
from graphft.ir.literals import evaluate
from graphft.ir.printer import NAME
from graphft.ir.symbolic import Symbols

RECORDS = "records"
"""The dimension of all records."""
_ALL = "@ALL"
_TORCH_ONLY = (
    "write it with torch's functions alone: it is captured as a model is, for any number of records; NumPy, "
    "scikit-learn and Python's int(), float(), .item() end that"
)


def auc(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the area under the ROC curve: how probably a record with label 1 has a higher score than one with label
    0; equal scores count half. `scores`: [records]; `labels`: [records], 0 or 1. float64; NaN if all labels are the
    same, or one is neither 0 nor 1, or a score is NaN.

    By ranks (Mann and Whitney, 1947), in n log n."""
    ordered = scores.sort()[0]
    below = torch.searchsorted(ordered, scores.contiguous())
    ranks = (below + torch.searchsorted(ordered, scores.contiguous(), right=True) + 1).double() / 2
    positive = labels.double()
    ones = positive.sum()
    zeros = positive.numel() - ones
    area = ((ranks * positive).sum() - ones * (ones + 1) / 2) / (ones * zeros)
    bad = scores.isnan().any() | ((labels != 0) & (labels != 1)).any()
    return torch.where(bad, math.nan, area)


def all_name(entry: str) -> str:
    """Returns the input of block `reduce` that holds this result of all batches."""
    return f"{entry}{_ALL}"


def columns_of(program: Program) -> list[Variable]:
    """Returns the inputs that a batch has: without those that hold results of all batches."""
    return [v for v in program.of_kind(Kind.INPUT) if not v.name.endswith(_ALL)]


def append_reducer(program: Program, name: str, function: Callable[..., Any], records: int) -> None:
    """Appends to block `reduce` what computes `name`, one float, of what `function` has as parameters. `records`: how
    many there will be.

    Raises GraphftError[reduce] for a parameter that is no such result, a result that is no float, what cannot be
    captured, is captured for another number of records, or draws random numbers.
    """
    if not NAME.fullmatch(name):
        raise _fail(f"reduce has {name!r}, expected a name of letters, digits, '_' and '.'", "rename it")
    entries = _entries(program, name, function)
    if name in program.variables:
        raise _fail(f"reduce has '{name}', a name that the program has already", "rename it")
    types = {entry: _of_all(program, entry) for entry in entries}
    symbols = Symbols(d for t in types.values() for d in t.shape or () if isinstance(d, int))

    def reduced(*values: Tensor) -> list[Tensor]:
        with torch.no_grad():
            found = function(*values)
        if not isinstance(found, Tensor) or found.dim() or not found.dtype.is_floating_point:
            raise _fail(
                f"reducer '{name}' returns {shown(found)}, expected one float",
                "return a tensor of shape [] and a float dtype: .sum(), .mean(); .double() of a count",
            )
        return [found.clone()]

    try:
        with captured(symbols):
            traced = trace(reduced, [symbols.tensor(t) for t in types.values()], symbols)
        assume = assumptions(symbols)
    except GraphftError as error:
        if error.rule == "reduce":
            raise
        help = error.help if error.rule == "dimension" else _TORCH_ONLY
        raise _fail(f"reducer '{name}' cannot be captured: {error.message}", help) from error
    for condition, line in assume:
        if not evaluate(condition, {RECORDS: records}):
            text = f"reducer '{name}' was captured for {condition} only ({line} decides on it), not {records} records"
            raise _fail(text, "leave out what depends on their number")
    for entry, type in types.items():
        if all_name(entry) not in program.variables:
            program.variable(all_name(entry), type, Kind.INPUT)
    block = program.block("reduce")
    block.attrs["results"] = (*block.attrs.get("results", ()), name)
    (result,) = traced.results
    assert result is not None
    emit(traced, block, [all_name(entry) for entry in entries], {result: name})
    for op in block.ops:
        definition = registry.get(op.type)
        if definition is not None and definition.effect:
            raise _fail(f"reducer '{name}' draws random numbers ({op.type})", "compute it of the records alone")


def _entries(program: Program, name: str, function: Callable[..., Any]) -> Sequence[str]:
    known = [n for n in program.attrs.get("extras", ()) if program.variables[n].type.shape]
    try:
        parameters = inspect.signature(function).parameters.values()
        wanted = [p.name for p in parameters if p.default is p.empty]  # of a default, it has its value
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            raise _fail(f"reducer '{name}' takes any parameters", "name those of loss_fn's results that it needs")
    except (TypeError, ValueError):
        raise UsageError(f"reducer '{name}' tells no parameters", rule="reduce", help="give a function") from None
    if unknown := [n for n in wanted if n not in known]:
        raise _fail(
            f"reducer '{name}' has parameter {unknown[0]}, and loss_fn returns no entry for each record of that name "
            f"(it returns {', '.join(known) or 'none'})",
            'return it beside the loss: loss, {"scores": scores, "labels": y}',
        )
    return wanted


def _of_all(program: Program, entry: str) -> Type:
    type = program.variables[entry].type
    return Type(type.dtype, (RECORDS, *(type.shape or ())[1:]))


def _fail(message: str, help: str) -> GraphftError:
    return GraphftError(message, rule="reduce", help=help)
