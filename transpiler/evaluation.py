"""The program that a job validates with, as it comes in: captured, and checked against the one that is trained."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from graphft.capture.loss_fn import check_told, reported
from graphft.errors import GraphftError, ProgramError, UsageError
from graphft.ir import Kind, Operator, Program, Type, registry
from graphft.ir.graph import needed_ops
from graphft.reducers import all_name, append_reducer, columns_of
from graphft.transpiler.inputs import check_columns

if TYPE_CHECKING:
    from graphft.data import DataSpec
    from graphft.transpiler.validation import Validation

NAME = "evaluation"
_TRAINS = ("aten.native_dropout", "aten._native_batch_norm_legit", "aten.native_batch_norm")
"""Operators that a model in eval mode does not have."""
_IN_EVAL_MODE = "graphft.build(model, loss_fn, inputs, training=False) captures in eval mode"
_DRAWS = "have the model draw in train mode only, dropout(x, training=self.training), and the function beside it never"


def evaluation_of(program: Program, validation: Validation) -> Program:
    """Returns the forward pass of the model of `program`, in eval mode. Raises GraphftError if none can be made of it.

    Each result beside the loss is one float: a mean over the batch. With reducers, it may be one entry for each record
    of the batch, too.
    """
    found = validation.program
    if found is None:
        if program.origin is None:
            text = f"program '{program.name}' was not captured by graphft.build in this process: it has no model"
            raise UsageError(text, rule="option", help="give Validation(program, data), with one that was")
        found = program.origin.evaluation(NAME, validation.loss_fn, _more_inputs(program, validation))
    evaluation = forward_only(found)
    check_evaluation(evaluation, help=_IN_EVAL_MODE if validation.program is not None else _DRAWS)
    for name, function in validation.reduce.items():
        assert validation.data is not None
        append_reducer(evaluation, name, function, validation.data.records)
    _check_results(evaluation)
    check_told(results_of(evaluation))
    return evaluation


def _more_inputs(program: Program, validation: Validation) -> dict[str, Any]:
    """Returns the columns of the held-out data alone that its `loss_fn` takes: a group, a weight."""
    if validation.loss_fn is None or program.origin.targets is not None:
        return {}
    import torch

    assert validation.data is not None
    data, taken = validation.data, inspect.signature(validation.loss_fn).parameters
    names = [name for name in list(taken)[1:] if name not in program.origin.inputs and name in data.types]
    return {name: ((None, *data.record_shape(name)), getattr(torch, data.types[name].dtype)) for name in names}


def _check_results(program: Program) -> None:
    """Raises GraphftError[metrics] for a result that is neither a mean nor what a reducer reads."""
    batch = {v.shape[0] for v in program.of_kind(Kind.INPUT) if v.shape}
    for name in reported(program):
        type = program.variables[name].type
        if not type.shape:
            if not type.dtype.startswith(("float", "bfloat")):
                raise _result(name, type, "expected a float, its mean over the batch")
        elif type.shape[0] not in batch:
            raise _result(name, type, "expected one float, or an entry for each record of the batch")
        elif all_name(name) not in program.variables:
            raise _result(name, type, "and no reducer reads it")


def _result(name: str, type: Type, what: str) -> GraphftError:
    help = f"return its mean, leave '{name}' out, or read it in a reducer: Validation(reduce={{...}})"
    return GraphftError(f"loss_fn returns '{name}' beside the loss as {type}, {what}", rule="metrics", help=help)


def forward_only(program: Program, results: Collection[str] = ()) -> Program:
    """Returns a copy without the ops that no result (by default the loss, and what is beside it) depends on."""
    new = program.clone()
    results = set(results or reported(program))
    block = new.blocks["step"]
    block.ops = needed_ops(block, results)
    used = results.union(*({*op.reads, *op.writes} for op in block.ops))
    for name in [v.name for v in new.variables.values() if v.name not in used and v.kind is not Kind.INPUT]:
        del new.variables[name]
        new.values.pop(name, None)
    return new


def check_evaluation(program: Program, purpose: str = "validate", help: str = "") -> None:
    """Raises ProgramError for what would depend on which process computes a batch, and when."""
    block, wrong = program.blocks["step"], ""
    for index, op in enumerate(block.ops):
        definition = registry.get(op.type)
        written = [n for n in registry.writes_of(op) if n in program.variables and _lasts(program, n)]
        if op.type in _TRAINS or (definition is not None and definition.effect and not _drops_nothing(op, definition)):
            wrong, help = f"has {op.type}: it is captured in train mode, or draws random numbers", help or _DRAWS
        elif written:
            wrong = f"changes %{written[0]}: its value would depend on which process has computed what before"
            help = "let the model change its buffers in train mode only (if self.training)"
        if wrong:
            text = f"the program to {purpose} with {wrong}"
            raise ProgramError(text, block=block, index=index, rule="option", help=help)


def _drops_nothing(op: Operator, definition: registry.OpDef) -> bool:
    """True for attention without dropout: torch marks it as one that draws all the same."""
    names = [slot.name for slot in definition.slots]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return (op.args[place] if place < len(op.args) else op.attrs.get("dropout_p", 0.0)) == 0.0


def _lasts(program: Program, name: str) -> bool:
    return program.variables[name].kind not in (Kind.TEMP, Kind.INPUT)


def results_of(program: Program) -> tuple[str, ...]:
    """Returns the names of the results of a validation: loss and means, then what is reduced of all records."""
    means = [name for name in reported(program) if not program.variables[name].type.shape]
    return (*means, *(program.blocks["reduce"].attrs["results"] if "reduce" in program.blocks else ()))


def check_fits(program: Program, evaluation: Program, data: DataSpec) -> None:
    """Raises GraphftError if the evaluation's weights are not the trained program's, or its inputs not the data's."""
    for v in evaluation.of_kind(Kind.PARAM, Kind.BUFFER, Kind.FROZEN):
        trained = program.variables.get(v.name)
        if trained is None or trained.type != v.type:
            found = "has none" if trained is None else f"has {trained.type}"
            text = f"the program to validate with has %{v.name}, {v.type}, and the program that is trained {found}"
            raise GraphftError(text, rule="option", help="build both of the same model")
    check_columns(columns_of(evaluation), data)


def check_criteria(evaluation: Program, metrics: Collection[str]) -> None:
    """Raises UsageError for a metric that a validation does not have."""
    found = results_of(evaluation)
    if unknown := [name for name in metrics if name not in found]:
        help = "return it beside the loss, or reduce to it: Validation(loss_fn=..., reduce={...})"
        text = f"a validation is to decide by '{unknown[0]}', and has {', '.join(found)}"
        raise UsageError(text, rule="option", help=help)
