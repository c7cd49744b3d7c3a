"""The trained model of a job, as a program that predicts: the forward pass in its folder, with its weights. And as
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
"""Sizes of a named dimension while it is exported, the first that fits. Torch would fix 0 and 1."""


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
            help = "give the folder or the storage of a job"
            raise UsageError(f"{source} holds no job", rule="job-directory", help=help)
        config, program = read_record(folder).config, load_prediction(folder)
        tell_untrained(program, load_program(folder / "source"))
        if weights is not None:
            return Trained(with_weights(program, read_weights(weights)), config, os.fspath(weights))
        stored = "" if is_url(source) or (folder / MODEL).exists() else url_of(folder)
        place = stored or source
        program = with_weights(program, read_weights(place, version=step))
        return Trained(program, config, f"{place}, {'the newest' if step is None else f'step {step}'}")


def best_model(source: str | os.PathLike[str], step: int | None = None) -> Path:
    """Returns the file of the best model by its validations, of a job's folder. Raises UsageError if there is none, for
    a URL, and for a `step`, which is another choice."""
    if step is not None:
        text = f"the best model is asked for, and step {step}, too"
        raise UsageError(text, rule="option", help="give one of them")
    if is_url(source):
        help = "give the job's folder: it has the validations"
        raise UsageError("the best model is asked for, of a URL", rule="option", help=help)
    folder = Path(weights_source(source))
    result = Result.of(folder, 0, 0.0)
    if (found := result.best) is None:
        help = "transpile(validate=graphft.Validation(data=..., best='loss')) keeps one; or leave best out"
        raise UsageError(result.missing_best() or f"{folder} has no best model", rule="no-checkpoint", help=help)
    if missing := result.missing_best():
        log.warning("%s", missing)
    return found.model


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
    text, help = "torch.export cannot export the program to predict with", "give a TO that ends in .safetensors"
    raise GraphftError(f"{text}: {describe(failed)}", rule="export", help=help) from failed


def _sizes(program: Program) -> dict[str, int]:
    """Returns a size of each named dimension of the inputs. Raises GraphftError[export] if none is found that fits."""
    names = {n for v in program.of_kind(Kind.INPUT) for d in v.shape for n in names_in(d)}
    conditions = [c for c, _ in program.attrs.get("assume", ()) if names_in(c) <= names]
    for sizes in (dict.fromkeys(names, size) for size in SIZES):
        if all(evaluate(c, sizes) for c in conditions):
            return sizes
    text = f"no size of the dimensions {', '.join(sorted(names))} was found that fulfils {', '.join(conditions)}"
    raise GraphftError(text, rule="export", help="declare them with fixed sizes in build()")


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
    """Registers buffer `a.b.c`, in submodules that are made for it; returns the last of them, and `c`."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_buffer(last, value.detach().clone())
    return module, last
