"""Weights go back: from a program's values to the model's `state_dict`, a plain safetensors file, or the model itself.

    state = graphft.state_dict(program, executor.scope(program))
    graphft.save_weights(program, executor.scope(program), "model.safetensors")
    graphft.load_into(model, "model.safetensors")

and into a program, before it is transpiled (`transpile(init_from=...)`): `load_weights`.

The file holds what `model.state_dict()` holds, under the same names, so torch loads it without graphft:
`model.load_state_dict(safetensors.torch.load_file(path))`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from graphft.disk.tensor_file import read_tensors, same_bits, write_tensors
from graphft.errors import GraphftError, UsageError
from graphft.ir import Kind, Program, Variable

log = logging.getLogger("graphft")

_CONVERT = (
    "for weights of another precision, convert them: init_from={{n: t.to({0}) if t.is_floating_point() else t "
    "for n, t in graphft.read_weights(SOURCE).items()}}; or give the model theirs before graphft.build"
)
SAVED = (Kind.PARAM, Kind.BUFFER, Kind.FROZEN)


def state_dict(program: Program, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The model's `state_dict`: parameters, frozen ones and saved buffers, each under all of its original names.

    `values` are by variable name (an executor's scope, for one), by default the program's initial values. The
    result's tensors are copies on the CPU; tied names share one. Raises GraphftError[weights] if a value is missing.
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
        state.update(dict.fromkeys((variable.name, *variable.attrs.get("tied", ())), value))
    return state


def saved_variables(program: Program) -> list[Variable]:
    """The variables that are in the model's `state_dict`, in the program's order."""
    return [v for v in program.of_kind(*SAVED) if v.attrs.get("persistent", True)]


def require_unchanged(program: Program, model: nn.Module) -> None:
    """Raises UsageError if the model's weights are others than when the program was built, which copied them."""
    if changed := changed_weights(program, model):
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise UsageError(
            f"the model's weights were changed after build(), which copied them: {', '.join(changed[:5])}{more}",
            rule="weights",
            help="load pretrained weights before build(): training would begin with the values from then",
        )


def changed_weights(program: Program, model: nn.Module) -> list[str]:
    """The names of the model's weights that are others than the program's initial values; not of those that were moved
    to `meta`, for the memory."""
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
    state, origin = (source, "the state") if isinstance(source, Mapping) else (_read(Path(source)), f"'{source}'")
    targets = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    problems = _differences(targets, state)
    if problems:
        shown = problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else [])
        raise GraphftError(
            f"{origin} does not fit the model: {'; '.join(shown)}",
            rule="weights",
            help="build the model with the configuration that it was trained with",
        )
    with torch.no_grad():
        for name, target in targets.items():
            if name in state:
                target.copy_(state[name])
    return model


def load_weights(program: Program, state: Mapping[str, Tensor], partial: bool = False) -> Program:
    """A copy of `program` that begins with these weights: parameters, frozen ones and saved buffers, by the names,
    shapes and dtypes of the model's `state_dict` (of tied tensors, one name is enough).

    Raises GraphftError[weights] if anything is missing, is too much or differs. With `partial` what fits is loaded, and
    a warning lists the rest; it is an error if nothing fits.
    """
    new, problems, used, others = program.clone(), [], set(), set[str]()
    for variable in saved_variables(program):
        names = (variable.name, *variable.attrs.get("tied", ()))
        given = [n for n in names if n in state]
        used.update(given)
        value, own = state[given[0]] if given else None, program.values[variable.name]
        if value is None:
            problems.append(f"{variable.name} is missing")
        elif not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            problems.append(f"{given[0]} is {_kind(value)}, expected a dense tensor with values")
        elif value.shape != own.shape or value.dtype != own.dtype:
            problems.append(f"{given[0]} is {_show(value)}, the program's is {_show(own)}")
            if value.shape == own.shape and value.is_floating_point() and own.is_floating_point():
                others.add(str(own.dtype))
        elif any(not torch.equal(value, state[n]) for n in given[1:]):
            problems.append(f"{' and '.join(given)} are one tensor in the program, and differ")
        else:
            new.values[variable.name] = value.detach().clone(memory_format=torch.contiguous_format).to(own.device)
    problems += [f"{n} is not in the program" for n in state if n not in used]
    changed = [n for n, value in new.values.items() if value is not program.values[n]]
    new.loaded, new.loaded_whole = new.loaded or bool(changed), new.loaded_whole or not problems
    convert = _CONVERT.format(others.pop()) if len(others) == 1 else ""
    if problems and not (partial and changed):
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise GraphftError(
            f"the weights do not fit program '{program.name}': {shown}",
            rule="weights",
            help=convert
            or "give the weights of this model"
            + ("; nothing of these fits" if partial else ", or load what fits: init_partial=True"),
        )
    if problems:
        log.warning(
            "%d variables of program '%s' are loaded; not loaded: %s%s",
            len(changed),
            program.name,
            "; ".join(problems),
            f" ({convert})" * bool(convert),
        )
    return new


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise GraphftError(f"there is no file '{path}'", rule="weights", help="give the path of a safetensors file")
    return read_tensors(path)[0]


def _differences(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    given = {id(t) for n, t in targets.items() if n in state}
    problems = [f"{n} is missing" for n, t in targets.items() if n not in state and id(t) not in given]
    problems += [f"{n} is not in the model" for n in state if n not in targets]
    for name, value in state.items():
        if name in targets and (value.shape != targets[name].shape or value.dtype != targets[name].dtype):
            problems.append(f"{name} is {_show(value)}, the model's is {_show(targets[name])}")
    return problems


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    return "a tensor on the meta device" if value.is_meta else f"a tensor of layout {value.layout}"


def _show(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
