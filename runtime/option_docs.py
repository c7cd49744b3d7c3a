"""The reference of options: writes docs/options.md from the code. `python -m graphft.runtime.option_docs [PATH]`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from graphft.runtime.launcher.options import LaunchOptions
from graphft.transpiler.api import OPTIONS
from graphft.transpiler.config import JobConfig

_HEAD = """# Options

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
_CALLED = {"passes": "epochs"}
"""Fields that are called otherwise where they are given."""


def page() -> str:
    """The whole page, in Markdown."""
    job = [f for f in dataclasses.fields(JobConfig) if f.name in (*OPTIONS, "data")]
    run = list(dataclasses.fields(LaunchOptions))
    where = "[running.md](running.md#everything-on-this-machine)"
    seen = f"| `on_status` | function | none | called with (supervisor, status), as often as the display: {where} |\n"
    seen += "| `callbacks` | list | none | hear of steps, passes, events: [trainer.md](trainer.md#callbacks) |\n"
    return f"{_HEAD}{_TABLE}{_rows(JobConfig, job, _CALLED)}{_BEGIN}{_RUN}{_TABLE}{_rows(LaunchOptions, run)}{seen}"


def _rows(options: type, fields: list[dataclasses.Field[Any]], called: Mapping[str, str] | None = None) -> str:
    texts, called = docstrings(options), called or {}
    return "".join(
        f"| `{called.get(f.name, f.name)}` | {_type(f)} | {_default(f)} | {_cell(texts[f.name])} |\n" for f in fields
    )


def docstrings(options: type) -> dict[str, str]:
    """The text below each field of a dataclass, on one line. A field without one is left out."""
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


def main(arguments: list[str]) -> int:
    """Writes the page. Returns the exit status."""
    Path(*arguments or ("docs/options.md",)).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
