"""The op reference: writes docs/ops.md from the definitions. `python -m graphft.opdocs [--check] [PATH]`."""

from __future__ import annotations

import argparse
import inspect
import sys
import typing
from itertools import groupby
from pathlib import Path

from graphft.ir import registry
from graphft.ir.printer import format_value
from graphft.ir.registry import Attr, OpDef

_HEAD = """# Operators

Made from the definitions in `ops/` by `python -m graphft.opdocs`; do not edit. Operators of torch (`aten.*`) are
torch's own: their operands and attributes are those of torch's schema.

In a signature the operands stand in parentheses (`*` takes any number of them, `!` is written in place), the attributes
in braces, with their defaults. An attribute without a default must be given.
"""


def reference() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    own = [d for d in registry.own_ops() if d.kernel.__module__.startswith("graphft.ops.")]
    for family, ops in groupby(own, key=lambda d: d.family):
        parts.append(f"## {family}\n")
        parts += [section(d) for d in ops]
    return "\n".join(parts)


def section(definition: OpDef) -> str:
    """One op: signature, docstring, attributes."""
    lines = [f"### `{definition.name}`", "", "```", _signature(definition), "```", "", definition.doc, ""]
    if definition.attrs:
        lines += ["| attribute | type | default |", "| --- | --- | --- |"]
        lines += [f"| `{a.name}` | {_type(a.type)} | {_default(a)} |" for a in definition.attrs]
        lines.append("")
    if definition.effect:
        lines += ["Has an effect beyond its results: it is never removed, and keeps its place among such ops.", ""]
    return "\n".join(lines)


def _signature(definition: OpDef) -> str:
    slots = ", ".join(
        f"{'*' if s.variadic else ''}%{s.name}{'!' if s.name in definition.writes else ''}" for s in definition.slots
    )
    attrs = ", ".join(a.name if a.required else f"{a.name} = {format_value(a.default)}" for a in definition.attrs)
    return f"{_results(definition)}{definition.name}({slots}){f' {{{attrs}}}' if attrs else ''}"


def _results(definition: OpDef) -> str:
    if definition.results is None:
        return "... = "
    return ", ".join(map(str, definition.results)) + (" = " if definition.results else "")


def _type(annotation: typing.Any) -> str:
    """An annotation as a reader writes it: `int`, `"a" or "b"`, `tuple of int`."""
    origin, params = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{format_value(p)}`" for p in params)
    if origin is tuple:
        if len(params) == 2 and params[1] is Ellipsis:
            return f"tuple of {_type(params[0])}"
        return f"({', '.join(map(_type, params))})"
    if origin is not None:
        return " or ".join(map(_type, params))
    if annotation in (None, type(None)):
        return "none"
    return "any" if annotation is typing.Any else getattr(annotation, "__name__", str(annotation))


def _default(attr: Attr) -> str:
    return "" if attr.default is inspect.Parameter.empty else f"`{format_value(attr.default)}`"


def main(argv: list[str] | None = None) -> int:
    """Writes the page, or with --check answers 1 if the file differs."""
    parser = argparse.ArgumentParser(prog="python -m graphft.opdocs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write: fail if the page is out of date")
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/ops.md"))
    options = parser.parse_args(argv)
    text = reference()
    if not options.check:
        options.path.write_text(text, encoding="utf-8")
        return 0
    if options.path.exists() and options.path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{options.path} is out of date: run `python -m graphft.opdocs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
