"""The reference pages: writes docs/ops.md and docs/options.md from the code. `python -m docs.reference`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from graphft.ir import registry
from graphft.ir.printer import format_value
from graphft.ir.registry import Attr, OpDef
from graphft.runtime.launcher.options import LaunchOptions
from graphft.transpiler.api import OPTIONS
from graphft.transpiler.config import JobConfig

_OPS = """# Operators

Made from the definitions in `ops/` by `make docs`; do not edit. Operators of torch (`aten.*`) are
torch's own: their operands and attributes are those of torch's schema.

In a signature the operands stand in parentheses (`*` takes any number of them, `!` is written in place), the attributes
in braces, with their defaults. An attribute without a default must be given.
"""


def ops_page() -> str:
    """Returns docs/ops.md."""
    parts = [_OPS]
    own = [d for d in registry.own_ops() if d.kernel.__module__.startswith("graphft.ops.")]
    for family, ops in groupby(own, key=lambda d: d.family):
        parts.append(f"## {family}\n")
        parts += [op_section(d) for d in ops]
    return "\n".join(parts)


def op_section(definition: OpDef) -> str:
    """Returns the section of an op: signature, docstring, attributes."""
    lines = [f"### `{definition.name}`", "", "```", _signature(definition), "```", "", definition.doc, ""]
    if definition.attrs:
        lines += ["| attribute | type | default |", "| --- | --- | --- |"]
        lines += [f"| `{a.name}` | {_type_in_words(a.type)} | {_default_of(a)} |" for a in definition.attrs]
        lines.append("")
    if definition.effect:
        lines += ["Has an effect beyond its results: it is never removed, and keeps its place among such ops.", ""]
    return "\n".join(lines)


def _signature(definition: OpDef) -> str:
    slots = ", ".join(
        f"{'*' if s.variadic else ''}%{s.name}{'!' if s.name in definition.writes else ''}" for s in definition.slots
    )
    attrs = ", ".join(a.name if a.required else f"{a.name} = {format_value(a.default)}" for a in definition.attrs)
    results = "..." if definition.results is None else ", ".join(map(str, definition.results))
    return f"{results}{' = ' if results else ''}{definition.name}({slots}){f' {{{attrs}}}' if attrs else ''}"


def _type_in_words(annotation: typing.Any) -> str:
    """Returns an annotation as a reader writes it: `int`, `"a" or "b"`, `tuple of int`."""
    origin, params = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{format_value(p)}`" for p in params)
    if origin is tuple:
        if len(params) == 2 and params[1] is Ellipsis:
            return f"tuple of {_type_in_words(params[0])}"
        return f"({', '.join(map(_type_in_words, params))})"
    if origin is not None:
        return " or ".join(map(_type_in_words, params))
    if annotation in (None, type(None)):
        return "none"
    return "any" if annotation is typing.Any else getattr(annotation, "__name__", str(annotation))


def _default_of(attr: Attr) -> str:
    return "" if attr.default is inspect.Parameter.empty else f"`{format_value(attr.default)}`"


_OPTIONS = """# Options

Made from the code by `make docs`; do not edit. Times are seconds.

## `graphft.transpile(program, ...)`

What a job is. These options are saved with the job; a script with other ones makes another job.

An option that has no effect in a job (`max_staleness` with `sync=True`) is an error there; one that only lacks
`ft=True` (`max_failures`) is a warning. Defaults may be given. `transpiler/config.py` lists what each option needs.

"""
_BEGIN = (
    "| `init_from` | path, URL or state_dict | none | Weights to begin with "
    "([checkpoints.md](checkpoints.md#to-and-from-others)). |\n"
    "| `init_partial` | bool | `False` | Of these what fits is loaded, and a warning lists the rest. |\n"
    "| `predict` | function | none | What the trained model predicts, `predict(model, x)`; by default what it returns "
    "in `loss_fn` ([predict.md](predict.md)). |\n"
    "| `check` | bool | `True` | The program is compared with the module that it was captured from, on the first "
    "batches ([capture.md](capture.md#the-program-is-compared-with-the-module)). |\n"
)
"""Arguments of `transpile` that are no fields of JobConfig: the initial values say it all, and what is predicted is no
part of the run."""
_RUN = """
## `job.run(...)`

How a job is launched on this machine; none of it changes the result. `graphft launch` has the same as `--trainers`,
`--no-fork-server` ..., which count before what the script says ([running.md](running.md#everything-on-this-machine)).

"""
_TABLE = "| option | type | default | what for |\n| --- | --- | --- | --- |\n"


def options_page() -> str:
    """Returns docs/options.md."""
    job = [f for f in dataclasses.fields(JobConfig) if f.name in OPTIONS]
    run = list(dataclasses.fields(LaunchOptions))
    where = "[running.md](running.md#everything-on-this-machine)"
    seen = f"| `on_status` | function | none | called with (supervisor, status), as often as the display: {where} |\n"
    seen += "| `callbacks` | list | none | hear of steps, epochs, events: [trainer.md](trainer.md#callbacks) |\n"
    return f"{_OPTIONS}{_TABLE}{_rows(JobConfig, job)}{_BEGIN}{_RUN}{_TABLE}{_rows(LaunchOptions, run)}{seen}"


def _rows(options: type, fields: list[dataclasses.Field[Any]]) -> str:
    texts = docstrings(options)
    return "".join(f"| `{f.name}` | {_type(f)} | {_default(f)} | {_cell(texts[f.name])} |\n" for f in fields)


def docstrings(options: type) -> dict[str, str]:
    """Returns the text below each field of a dataclass, on one line. A field without one is left out."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    found = {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def _type(field: dataclasses.Field[Any]) -> str:
    text = str(field.type).replace(" | None", " or none").replace("ValidationConfig", "Validation")
    if text.startswith("Literal["):
        return _cell(" or ".join(f"`{choice.strip()}`" for choice in text[len("Literal[") : -1].split(",")))
    return _cell(text)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return "none" if field.default is None else f"`{field.default!r}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path("docs/ops.md").write_text(ops_page(), encoding="utf-8")
    Path("docs/options.md").write_text(options_page(), encoding="utf-8")
