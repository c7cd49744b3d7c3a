"""Weights go back: from a program's values to the model's `state_dict`, a plain safetensors file, or the model itself.

    graphft.save_weights(program, executor.scope(program), "model.safetensors")
    graphft.load_into(model, "model.safetensors")

The file holds what `model.state_dict()` holds, under the same names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from graphft.capture.loss_fn import shown
from graphft.disk.tensor_file import read_tensors, same_bits, write_tensors
from graphft.errors import GraphftError, UsageError, listed
from graphft.ir import Kind, Program, Variable

log = logging.getLogger("graphft")

SAVED = (Kind.PARAM, Kind.BUFFER, Kind.FROZEN)


def state_dict(program: Program, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the model's `state_dict`: parameters, frozen ones and saved buffers, under all of their original names.

    `values` are by variable name, by default the program's initial values. The result's tensors are copies on the CPU;
    tied names share one. Raises GraphftError[weights] if a value is missing.
    """
    source = program.values if values is None else values
    state: dict[str, Tensor] = {}
    for variable in saved_variables(program):
        if variable.name not in source:
            raise GraphftError(
                f"program '{program.name}' has no value of %{variable.name}",
                rule="weights",
                help="give the scope of an executor that ran the program",
            )
        value = source[variable.name].detach().clone(memory_format=torch.contiguous_format).cpu()
        state.update(dict.fromkeys(_names(variable), value))
    return state


def saved_variables(program: Program) -> list[Variable]:
    """The variables that are in the model's `state_dict`, in the program's order."""
    return [v for v in program.of_kind(*SAVED) if v.attrs.get("persistent", True)]


def _names(variable: Variable) -> tuple[str, ...]:
    return variable.name, *variable.attrs.get("tied", ())


def require_unchanged(program: Program, model: nn.Module) -> None:
    """Raises UsageError if the model's weights are others than when the program was built, which copied them."""
    if changed := _changed_weights(program, model):
        raise UsageError(
            f"the model's weights were changed after build(), which copied them: {listed(changed)}",
            rule="weights",
            help="load pretrained weights before build(): training would begin with the values from then",
        )


def tell_changed_weights(program: Program) -> None:
    """Warns if the weights of the model are others than those that the program begins with."""
    known = program.origin is not None and not program.loaded
    if known and (changed := _changed_weights(program, program.origin.model)):
        log.warning(
            "the model's weights are others than those that build() copied, with which training begins: %s; load "
            "weights before build(), or give transpile(init_from=model.state_dict())",
            listed(changed),
        )


def _changed_weights(program: Program, model: nn.Module) -> list[str]:
    """The names of the model's weights that are others than the program's initial values; those that were moved to
    `meta`, for the memory, are not."""
    now = model.state_dict(keep_vars=True)
    return [
        v.name
        for v in saved_variables(program)
        if isinstance(value := now.get(v.name), Tensor)
        and not (value.is_meta or same_bits(value, program.values[v.name]))
    ]


def save_weights(program: Program, values: Mapping[str, Tensor] | None, path: str | os.PathLike[str]) -> Path:
    """Writes `state_dict(program, values)` as a safetensors file: whole, or not at all. Returns its path."""
    path = Path(path)
    write_tensors(path, state_dict(program, values), {"format": "pt"})
    return path


def load_into(model: nn.Module, source: str | os.PathLike[str] | Mapping[str, Tensor]) -> nn.Module:
    """Copies weights into the model, in place, and returns it.

    `source` is a safetensors file or a state dict. Names, shapes and dtypes must be the model's (of tied tensors, one
    name is enough). All of them are checked first: when GraphftError[weights] is raised, the model is as it was.
    """
    if not isinstance(source, Mapping) and not Path(source).is_file():
        raise GraphftError(f"there is no file '{source}'", rule="weights", help="give the path of a safetensors file")
    state = source if isinstance(source, Mapping) else read_tensors(Path(source))[0]
    targets = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    tied: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        tied.setdefault(id(tensor), []).append(name)
    found, problems = _fitting([(targets[names[0]], names) for names in tied.values()], state)
    if problems:
        raise GraphftError(
            f"the weights do not fit the model: {listed(problems, '; ')}",
            rule="weights",
            help="build the model with the configuration that it was trained with",
        )
    with torch.no_grad():
        for name, value in found.items():
            targets[name].copy_(value)
    return model


def load_weights(program: Program, state: Mapping[str, Tensor], partial: bool = False) -> Program:
    """A copy of `program` that begins with these weights: parameters, frozen ones and saved buffers, by the names,
    shapes and dtypes of the model's `state_dict` (of tied tensors, one name is enough).

    Raises GraphftError[weights] if anything is missing, is too much or differs. With `partial` what fits is loaded, and
    a warning lists the rest; it is an error if nothing fits.
    """
    new = program.clone()
    found, problems = _fitting([(program.values[v.name], _names(v)) for v in saved_variables(program)], state)
    if problems and not (partial and found):
        raise GraphftError(
            f"the weights do not fit program '{program.name}': {listed(problems, '; ')}",
            rule="weights",
            help="give the weights of this model, converted to its dtypes"
            + ("; nothing of these fits" if partial else ", or load what fits: init_partial=True"),
        )
    for name, value in found.items():
        own = program.values[name]
        new.values[name] = value.detach().clone(memory_format=torch.contiguous_format).to(own.device)
    new.loaded, new.loaded_whole = new.loaded or bool(found), new.loaded_whole or not problems
    if problems:
        what = "%d variables of program '%s' are loaded; not loaded: %s"
        log.warning(what, len(found), program.name, "; ".join(problems))
    return new


def _fitting(
    wanted: Sequence[tuple[Tensor, Sequence[str]]], state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the value of each wanted tensor, by the first of its names, and what does not fit."""
    found: dict[str, Tensor] = {}
    problems = []
    for own, names in wanted:
        given = [n for n in names if n in state]
        value = state[given[0]] if given else None
        if value is None:
            problems.append(f"{names[0]} is missing")
        elif not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            problems.append(f"{given[0]} is no dense tensor with values")
        elif value.shape != own.shape or value.dtype != own.dtype:
            problems.append(f"{given[0]} is {shown(value)}, expected {shown(own)}")
        elif any(not same_bits(value, state[n]) for n in given[1:]):
            problems.append(f"{' and '.join(given)} are one tensor, and differ")
        else:
            found[names[0]] = value
    known = {n for _, names in wanted for n in names}
    return found, problems + [f"{n} is not known" for n in state if n not in known]
