"""A job's program to predict with, and its weights, as one file of plain torch: `.pt2`, of `torch.export`.

    predict = torch.export.load("model.pt2").module()
    predict(x)                    # a tensor; where several are predicted, a dict of them by name

The program's ops are torch's own: what is exported is the program itself, the same ops in the same order.
"""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from graphft.disk.fileio import PIECE, replacing
from graphft.errors import GraphftError, describe
from graphft.ir import Kind, Program
from graphft.ir.literals import dtype_of, evaluate, names_in
from graphft.runtime.execute.lowering import lower
from graphft.transpiler.prediction import WEIGHTS

SIZES = (4, 6, 8, 12, 16, 3, 5, 7, 9, 2, 32, 64)
"""Of a named dimension while it is exported: the first that the program was captured for. Torch would fix 0 and 1."""


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


def write_exported(path: Path, program: ExportedProgram) -> int:
    """Writes the file, whole or not at all. Returns its bytes. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="graphft-") as scratch:
        made = Path(scratch, "made.pt2")
        torch.export.save(program, made)
        with made.open("rb") as source, replacing(path) as target:
            while piece := source.read(PIECE):
                target.write(piece)
        return made.stat().st_size


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
