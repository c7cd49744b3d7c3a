"""The program that a job predicts with: the model's forward pass in eval mode, which gives an entry for each record.

It lies in the job's folder beside the programs that train, and is no part of what the run is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphft.capture.model import Origin
from graphft.capture.weights import SAVED, saved_variables
from graphft.errors import GraphftError, UsageError, describe, listed
from graphft.ir import Kind, Program, Type
from graphft.ir.literals import names_in
from graphft.ir.storage import load_program, save_program
from graphft.transpiler.evaluation import check_evaluation, forward_only
from graphft.transpiler.record import PREDICTION

log = logging.getLogger("graphft")

NAME = "prediction"
OUTPUT = "output"
"""Name of a result that has none of its own."""
WEIGHTS = (*SAVED, Kind.CONST)
_AN_ENTRY = "return tensors whose first dimension is that of the inputs, by name: {'scores': scores}"
_SAY = "say what to predict: transpile(..., predict=lambda model, x: model(x))"

PredictFn = Callable[..., Any]


def prediction_of(origin: Origin | None, predict: PredictFn | None = None) -> Program:
    """Returns the forward pass of the model of `origin`, in eval mode, with the inputs that it needs.

    Each of its results (attribute `extras`) has an entry for each record. `predict(model, **inputs)` returns a tensor,
    or several by name; what it does not take of the program's inputs (labels) it is not given. By default, what the
    model returns in `loss_fn`, without what has no such entry. Raises GraphftError if no program can be made of it.
    """
    if origin is None:
        text = "the program was not captured by graphft.build in this process: there is no model to predict with"
        raise UsageError(text, rule="predict", help="transpile what graphft.build returned")
    if predict is not None:
        call, inputs = _as_loss(predict), _inputs_of(predict, origin.inputs)
    elif origin.capture:
        call, inputs = _of_loss(origin), tuple(origin.inputs)
    else:
        text = "what a program that was built with capture=False predicts is not known"
        raise UsageError(text, rule="predict", help=_SAY)
    program = origin.forward(NAME, call, inputs)
    found = _check_results(program, strict=predict is not None)
    program.attrs["extras"] = tuple(found)
    del program.attrs["loss"]
    program = forward_only(program, found)
    used = {name for op in program.blocks["step"].ops for name in op.reads}
    for v in program.of_kind(Kind.INPUT):
        if v.name not in used:
            del program.variables[v.name]
    check_evaluation(program, "predict")
    _check_inputs(program)
    return program


def default_prediction(origin: Origin | None) -> Program | None:
    """Returns the same, unasked, or None if it cannot be captured; without warnings, as the capture of the program that
    trains has given them."""
    logger, reason = logging.getLogger("graphft"), ""
    before, logger.disabled = logger.disabled, True
    try:
        return prediction_of(origin)
    except Exception as error:  # of the user's model, which is called as it may never be
        reason = describe(error)
        return None
    finally:
        logger.disabled = before
        if reason:
            log.info("what the job predicts is not known: %s", reason)


# -- what is captured -------------------------------------------------------------------------------------------------


def _inputs_of(predict: PredictFn, inputs: Collection[str]) -> Sequence[str]:
    """Returns those that `predict` takes, behind the model. Raises UsageError[predict] if it takes anything else."""
    try:
        _, *others = inspect.signature(predict).parameters.values()
    except (TypeError, ValueError):
        what = f"predict is a {type(predict).__name__}, expected a function of the model and its inputs"
        raise UsageError(what, rule="predict", help="predict=lambda model, x: model(x)") from None
    if any(p.kind is p.VAR_KEYWORD for p in others):
        return tuple(inputs)
    if unknown := [p.name for p in others if p.name not in inputs and p.default is p.empty]:
        what = f"predict takes {unknown[0]}, and the program has no such input: it has {', '.join(inputs)}"
        raise UsageError(what, rule="predict", help="name its parameters, behind the model, like inputs of build()")
    return tuple(p.name for p in others if p.name in inputs)


def _as_loss(predict: PredictFn) -> Callable[..., Any]:
    """Returns `predict` as what `build` captures: results beside a loss, which is dropped later."""

    def call(model: nn.Module, **inputs: Tensor) -> Any:
        result = _by_name(predict(model, **inputs))
        if not isinstance(result, Mapping) or not all(isinstance(value, Tensor) for value in result.values()):
            raise _bad(f"predict returns a {type(result).__name__}, expected a tensor, or several by name")
        return torch.zeros(()), {str(name): value for name, value in result.items()}

    return call


def _of_loss(origin: Origin) -> Callable[..., Any]:
    """Returns the same of what the model returns where `loss_fn` calls it, before `loss_fn` changes it in place."""
    loss_fn = origin.whole_loss_fn()

    def call(model: nn.Module, **inputs: Tensor) -> Any:
        returned: list[dict[str, Tensor]] = []

        def keep(_module: nn.Module, _given: Any, result: Any) -> None:
            found = _by_name(result)
            named = found.items() if isinstance(found, Mapping) else ()
            returned.append({str(n): t.clone() for n, t in named if isinstance(t, Tensor) and n != "loss"})

        hook = model.register_forward_hook(keep)
        try:
            loss_fn(model, **inputs)
        finally:
            hook.remove()
        if len(returned) != 1:
            what = f"loss_fn calls the model {len(returned)} times: which of its results is to be predicted?"
            raise UsageError(what, rule="predict", help=_SAY)
        return torch.zeros(()), returned[0]

    return call


def _by_name(result: Any) -> Any:
    if isinstance(result, Tensor):
        return {OUTPUT: result}
    return {f"{OUTPUT}{i}": v for i, v in enumerate(result)} if isinstance(result, (tuple, list)) else result


def _check_results(program: Program, *, strict: bool) -> list[str]:
    """Returns the results that have an entry for each record; others are an error if `strict`."""
    batch = {v.shape[0] for v in program.of_kind(Kind.INPUT) if v.shape}
    names = set().union(*(names_in(dim) for dim in batch))
    found = []
    for name in program.attrs.get("extras", ()):
        type = program.variables[name].type
        first, *others = type.shape or (None,)
        if first in batch and not any(names_in(dim) & names for dim in others if dim is not None):
            found.append(name)
        elif strict:
            raise _bad(f"predict returns '{name}' as {type}, expected an entry for each record, of one shape")
    if not found:
        what = "predict returns" if strict else "where loss_fn calls the model, it returns"
        raise UsageError(f"{what} no tensor with an entry for each record", rule="predict", help=_SAY)
    return found


def _check_inputs(program: Program) -> None:
    inputs = program.of_kind(Kind.INPUT)
    if not inputs or any(not v.shape for v in inputs) or len({v.shape[0] for v in inputs}) != 1:
        found = ", ".join(map(str, inputs)) or "none"
        text = f"the inputs to predict from are {found}: expected some with the records along their first dimension"
        raise UsageError(text, rule="predict", help="give all inputs of build() that dimension (None)")


def _bad(message: str) -> UsageError:
    return UsageError(message, rule="predict", help=_AN_ENTRY)


# -- weights ----------------------------------------------------------------------------------------------------------


def with_weights(program: Program, state: Mapping[str, Tensor]) -> Program:
    """Returns a copy with the values of a trained model's `state_dict`, which may have more of them; constants keep
    their own. Raises GraphftError[weights] for what is missing or differs."""
    new, problems = program.clone(), []
    for v in program.of_kind(*WEIGHTS):
        name = next((n for n in (v.name, *v.attrs.get("tied", ())) if n in state), None)
        if name is None:
            problems += [f"{v.name} is missing"] if v.name not in program.values else []
            continue
        value = state[name]
        found = Type(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if found != v.type:
            problems.append(f"{name} is {found}, expected {v.type}")
        new.values[v.name] = value.detach().cpu().contiguous()
    if problems:
        text = f"the weights do not fit the program to predict with: {listed(problems, '; ')}"
        raise GraphftError(text, rule="weights", help="both are to be of one job: was the folder copied as a whole?")
    return new


def tell_untrained(program: Program, source: Program) -> None:
    """Warns of each buffer that training changes, and that the model's file does not have (persistent=False)."""
    for v in program.of_kind(*WEIGHTS):
        trained = source.variables.get(v.name)
        if trained is not None and trained.kind is Kind.BUFFER and not trained.attrs.get("persistent", True):
            what = "buffer %s is not saved with the model (persistent=False): predict uses its first value"
            log.warning(what, v.name)


# -- files ------------------------------------------------------------------------------------------------------------


def save_prediction(program: Program, source: Program, folder: Path) -> None:
    """Writes it into the job's folder, without the values that come from the trained model of the job's `source`."""
    new, trained = program.clone(), {v.name for v in saved_variables(source)}
    new.values = {name: value for name, value in program.values.items() if name not in trained}
    save_program(new, folder / PREDICTION, sealed=True)


def load_prediction(folder: Path) -> Program:
    """Returns what `save_prediction` wrote. Raises UsageError[predict] if the job has none."""
    if not (folder / PREDICTION).exists():
        text = f"the job in {folder} has no program to predict with: what its model returns was not captured"
        help = f"in its script, transpile(..., predict=...) says what, and job.save_prediction('{folder}') adds it"
        raise UsageError(text, rule="predict", help=help)
    return load_program(folder / PREDICTION)
