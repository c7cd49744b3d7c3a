"""What a job has trained, as a program that predicts: the forward pass in its folder, with the newest weights. And as
one file of plain torch, `.pt2` of `torch.export`:

    predict = torch.export.load("model.pt2").module()
    predict(x)                    # a tensor; where several are predicted, a dict of them by name

The program's ops are torch's own: what is exported is the program itself, the same ops in the same order.
"""

from __future__ import annotations

import inspect
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from graphft.errors import GraphftError, UsageError, describe
from graphft.ir import Kind, Program
from graphft.ir.literals import dtype_of, evaluate, names_in
from graphft.ir.storage import load_program
from graphft.runtime.coordination.job_files import MODEL, is_url, url_of
from graphft.runtime.coordination.runs import weights_source
from graphft.runtime.execute.lowering import lower
from graphft.runtime.interchange.training_state import job_folder
from graphft.runtime.interchange.weights import read_weights
from graphft.runtime.launcher.result import Result
from graphft.transpiler.config import JobConfig
from graphft.transpiler.prediction import WEIGHTS, load_prediction, tell_untrained, with_weights
from graphft.transpiler.record import read_record

log = logging.getLogger("graphft")

SIZES = (4, 6, 8, 12, 16, 3, 5, 7, 9, 2, 32, 64)
"""Of a named dimension while it is exported: the first that the program was captured for. Torch would fix 0 and 1."""


@dataclass(frozen=True)
class Trained:
    """`program`: to predict with, and its weights. `config`: the job's. `weights`: which they are, in words."""

    program: Program
    config: JobConfig
    weights: str


def read_trained(
    source: str | os.PathLike[str],
    step: int | None = None,
    best: bool = False,
    weights: str | os.PathLike[str] | None = None,
) -> Trained:
    """Reads a job's folder, or the URL of its storage: with the trained model; of a job that is not complete (a warning
    says so), or with a `step`, the weights of a checkpoint; or the `best` model by its validations, of a folder; or
    other `weights` of the same model, whatever `read_weights` reads. The job may be running.

    Raises UsageError for what is no job's, has no program to predict with, or no such weights; GraphftError for what
    is damaged; OSError where the storage fails.
    """
    source = weights_source(source)
    if weights is not None and (best or step is not None):
        raise UsageError("weights are given, and step or best, too", rule="option", help="give one of them")
    if best:
        weights = best_model(source, step)
    with job_folder(source, whole=True) as folder:
        if folder is None:
            raise UsageError(
                f"{source} holds no job", rule="job-directory", help="give the folder or the storage of a job"
            )
        complete = weights is not None or (folder / MODEL).exists()
        url = os.fspath(source).rstrip("/") if is_url(source) else "" if complete else url_of(folder)
        return _trained(folder, url, step, weights)


def best_model(source: str | os.PathLike[str], step: int | None = None) -> Path:
    """Returns the file of the best model by its validations, of a job's folder. Raises UsageError if there is none, for
    a URL, and for a `step`, which is another choice."""
    if step is not None or is_url(source):
        raise UsageError(
            "the best model is asked for, and " + (f"step {step}, too" if step is not None else "of a URL"),
            rule="option",
            help="give one of them" if step is not None else "give the job's folder: it has the validations",
        )
    folder = Path(weights_source(source))
    result = Result.of(folder, 0, 0.0)
    found = result.best
    missing = result.missing_best()
    if missing and found is None:
        raise UsageError(missing, rule="no-checkpoint", help="predict with the newest model: leave out best")
    if missing:
        log.warning("%s", missing)
    if found is None:
        raise UsageError(
            f"{folder} has no best model",
            rule="no-checkpoint",
            help="transpile(validate=graphft.Validation(data=..., best='loss')) keeps one, from its first on",
        )
    return found.model


def _trained(folder: Path, url: str, step: int | None, weights: str | os.PathLike[str] | None) -> Trained:
    """`url`: of the storage that has the weights; "": the folder has."""
    config, program = read_record(folder).config, load_prediction(folder)
    tell_untrained(program, load_program(folder / "source"))
    if weights is not None:
        return Trained(with_weights(program, read_weights(weights)), config, os.fspath(weights))
    program = with_weights(program, read_weights(url or folder, version=step))
    place = url or str(folder)
    return Trained(program, config, f"{place}, {'the newest' if step is None else f'step {step}'}")


# -- .pt2 -------------------------------------------------------------------------------------------------------------


def export_program(program: Program) -> ExportedProgram:
    """`program`: with its weights. Its named dimensions stay open.

    Raises GraphftError[export] for what torch cannot export so.
    """
    sizes, inputs = _sizes(program), program.of_kind(Kind.INPUT)
    example = tuple(torch.zeros([evaluate(d, sizes) for d in v.shape], dtype=dtype_of(v.type)) for v in inputs)
    for batch in (Dim("batch"), Dim.DYNAMIC):  # the first is of any size, for the second 1 is none that it was made for
        open_dims = {
            v.name: {i: Dim.DYNAMIC if i else batch for i, d in enumerate(v.shape) if isinstance(d, str)}
            for v in inputs
        }
        try:
            with torch.no_grad():
                return torch.export.export(_module(program), example, dynamic_shapes=open_dims)
        except Exception as error:  # torch has no one class of them
            failed = error
    raise GraphftError(
        f"torch.export cannot export the program to predict with: {describe(failed)}",
        rule="export",
        help="its weights alone: give a TO that ends in .safetensors",
    ) from failed


def _sizes(program: Program) -> dict[str, int]:
    """A size of each named dimension of the inputs. Raises GraphftError[export] if none is found that fits."""
    names = sorted({n for v in program.of_kind(Kind.INPUT) for d in v.shape for n in names_in(d)})
    found: dict[str, int] = {}
    for name in names:
        asked = [c for c, _ in program.attrs.get("assume", ()) if name in names_in(c)]
        for size in SIZES:
            known = {**found, name: size}
            if all(evaluate(c, known) for c in asked if names_in(c) <= known.keys()):
                found = known
                break
        else:
            raise GraphftError(
                f"no size of dimension {name} was found that fulfils what the program was captured for: "
                f"{', '.join(asked)}",
                rule="export",
                help="declare that dimension with a fixed size in build()",
            )
    return found


def _module(program: Program) -> nn.Module:
    """Runs the program's block. Its buffers have the names that parameters and buffers have in the trained model."""
    outputs: tuple[str, ...] = tuple(program.attrs["extras"])
    run, inputs = lower(program.blocks["step"], fetch=outputs), [v.name for v in program.of_kind(Kind.INPUT)]
    module = nn.Module()
    weights = {v.name: _register(module, v.name, program.values[v.name]) for v in program.of_kind(*WEIGHTS)}

    def forward(*values: Tensor) -> Tensor | dict[str, Tensor]:
        scope: dict[str, Any] = dict(zip(inputs, values, strict=True))
        scope |= {name: getattr(owner, last) for name, (owner, last) in weights.items()}
        results = run(None, scope)
        return results[0] if len(results) == 1 else dict(zip(outputs, results, strict=True))

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in inputs]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    module.forward = forward
    return module


def _register(module: nn.Module, name: str, value: Tensor) -> tuple[nn.Module, str]:
    """Buffer `a.b.c` of the module, in submodules that are made for it: the last of them, and `c`."""
    *path, last = name.split(".")
    for part in path:
        inner = dict(module.named_children()).get(part)
        if inner is None:
            inner = nn.Module()
            module.add_module(part, inner)
        module = inner
    module.register_buffer(last, value.detach().clone())
    return module, last
