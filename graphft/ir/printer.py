"""Text of a program. `graphft.ir.parser` reads it back: `parse(str(p)) == p`.

    program     ::= "program" label attrs?  declaration*  block*
    declaration ::= kind variable ":" type attrs?              kind: input param buffer state frozen const temp
    block       ::= "block" label attrs? ":"  op*
    op          ::= (result ("," result)* "=")? NAME "(" (value ("," value)*)? ")" attrs?
    result      ::= "_" | variable (":" type)?
    variable    ::= "%" LABEL
    type        ::= NAME ("[" (dim ("," dim)*)? "]")?          a dim is an integer or an expression: 2*batch
    attrs       ::= "{" (label "=" value ("," label "=" value)*)? "}"
    label       ::= LABEL | string
    value       ::= variable | "true" | "false" | "none" | integer | float | string | symbol | tuple
    tuple       ::= "(" ")" | "(" value "," ")" | "(" value ("," value)+ ")"
    LABEL       ::= [A-Za-z0-9_.@/-]+                          NAME ::= [A-Za-z_][A-Za-z0-9_.]*

One declaration, block head or op stands on a line; blank lines and what follows a `#` are skipped. `_` is a result
that is not wanted. Floats are written like Python's (`inf`, `-inf` and `nan` too), strings like JSON's; a symbol
(`torch.float32`, `@device`) is a literal of no Python type.

A temporary has its type where an op produces it; everything else is declared at the top. Attributes are sorted, and
those that equal the default of the op's definition are left out. No address, time or id is ever printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from graphft.ir import registry
from graphft.ir.types import Arg, Kind, Ref, Sym

if TYPE_CHECKING:
    from graphft.ir import Block, Operator, Program, Variable

LABEL = re.compile(r"[A-Za-z0-9_.@/-]+")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
DIM = re.compile(r"[A-Za-z0-9_+*/%(). ,-]+")


def format_program(program: Program) -> str:
    """The whole program, ending with a newline."""
    lines = [f"program {_label(program.name)}{_attrs(program.attrs)}"]
    declared = list(declarations(program))
    lines += [""] * bool(declared) + [format_variable(v) for v in declared]
    for block in program.blocks.values():
        lines += ["", format_block(block)]
    return "\n".join(lines) + "\n"


def format_block(block: Block) -> str:
    """A block's head and its ops, one per line, without a newline at the end."""
    head = f"block {_label(block.name)}{_attrs(block.attrs)}:"
    return "\n".join([head, *(f"  {format_operator(op, block.program)}" for op in block.ops)])


def format_operator(op: Operator, program: Program) -> str:
    """One op on one line. Never fails: what cannot be written in the grammar shows as `<its Python type>`."""
    results = ", ".join(_result(name, program) for name in op.outputs)
    args = ", ".join(map(format_value, op.args))
    return f"{results}{' = ' if results else ''}{op.type}({args}){_attrs(registry.given_attrs(op))}"


def format_variable(variable: Variable) -> str:
    """A declaration: `param %fc.weight: float32[64, 8] {trainable = true}`."""
    return f"{variable.kind.value} {variable}{_attrs(variable.attrs)}"


def declarations(program: Program) -> Iterator[Variable]:
    """The variables that print at the top, by kind: all but temporaries that ops produce (unless they have attrs)."""
    produced = {name for block in program.blocks.values() for op in block.ops for name in op.writes}
    for kind in Kind:
        for v in program.of_kind(kind):
            if kind is not Kind.TEMP or v.attrs or v.name not in produced:
                yield v


def format_value(value: Arg) -> str:
    """An operand or attribute value."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, (Ref, Sym)):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    return f"<{type(value).__name__}>"


def quote(text: str) -> str:
    """A string literal; what is not printable is escaped, so that a literal never breaks its line."""
    plain = (char if char.isprintable() and char not in '"\\' else json.dumps(char)[1:-1] for char in text)
    return f'"{"".join(plain)}"'


def _result(name: str | None, program: Program) -> str:
    if name is None:
        return "_"
    v = program.variables.get(name)
    return f"%{name}" if v is None or v.kind is not Kind.TEMP or v.attrs else str(v)


def _label(text: str) -> str:
    return text if LABEL.fullmatch(text) else quote(text)


def _attrs(attrs: Mapping[str, Arg]) -> str:
    body = ", ".join(f"{_label(k)} = {format_value(attrs[k])}" for k in sorted(attrs))
    return f" {{{body}}}" if body else ""
