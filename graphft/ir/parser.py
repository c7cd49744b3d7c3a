"""Reads a program's text back: `parse(format_program(p)) == p`. The grammar stands in `graphft.ir.printer`.

Text may come from anywhere: nothing of it is evaluated, and every error says where it is.
"""

from __future__ import annotations

import json
import re
from typing import Any

from graphft.errors import GraphftError
from graphft.ir import Arg, Block, Dim, Kind, Operator, Program, Ref, Sym, Type, Variable
from graphft.ir.printer import DIM, LABEL, NAME

MAX_DEPTH = 64
"""Tuples nested deeper than this are refused (the parser recurses)."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|%?[A-Za-z0-9_.@/+-]+|#.*|\S')
_INTEGER = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"-?(?:inf|nan|[0-9]+(\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_SYMBOL = re.compile(r"[A-Za-z_@][A-Za-z0-9_.@/-]*")
_WORDS = {"true": True, "false": False, "none": None}
_KINDS = {k.value: k for k in Kind}
_STRINGS = json.JSONDecoder(strict=False)


class ParseError(GraphftError):
    """Text that is no program. The message begins with source, line and column, which count from 1."""


def parse(text: str, source: str = "<text>") -> Program:
    """The program that `text` holds; `source` names it in errors. Raises ParseError.

    Only the form is checked. What the program means (ops, types, order) is for `graphft.ir.verify` to say.
    """
    program: Program | None = None
    block: Block | None = None
    for number, content in enumerate(text.split("\n"), 1):
        line = _Line(content, f"{source}:{number}")
        if not line.tokens:
            continue
        if program is None:
            line.need("program")
            program = Program(line.label(), line.attrs())
        elif line.take("block"):
            block = line.block_head(program)
        elif line.next in _KINDS and line.tokens[1:] and line.tokens[1][0].startswith("%"):
            if block is not None:
                raise line.error("an op or a block (declarations stand before the first block)")
            line.declaration(program)
        elif block is None:
            raise line.error(f"a block or a declaration ({', '.join(_KINDS)})")
        else:
            block.ops.append(line.operator(program))
        if line.next:
            raise line.error("the end of the line")
    if program is None:
        raise _Line("", f"{source}:1").error("`program NAME`")
    return program


class _Line:
    """The tokens of one line, each with its column, and how many have been read."""

    def __init__(self, text: str, place: str) -> None:
        self.text, self.place, self.at = text, place, 0
        self.tokens = [(m[0], m.start()) for m in _TOKEN.finditer(text) if not m[0].startswith("#")]

    # -- the grammar's rules --------------------------------------------------------------------------------------

    def block_head(self, program: Program) -> Block:
        name = self.label(unless=program.blocks)
        block = program.block(name)
        block.attrs = self.attrs()
        self.need(":")
        return block

    def declaration(self, program: Program) -> None:
        kind = _KINDS[self.read("a kind")]
        name = self.variable(unless=program.variables)
        self.need(":")
        program.variables[name] = Variable(name, self.type(), kind, self.attrs(), program)

    def operator(self, program: Program) -> Operator:
        outputs: list[str | None] = []
        while self.next == "_" or self.next.startswith("%"):
            outputs.append(self.result(program))
            if not self.take(","):
                self.need("=")
                break
        op = self.read("the name of an op", NAME)
        self.need("(")
        return Operator(op, self.values(0), self.attrs(), tuple(outputs))

    def result(self, program: Program) -> str | None:
        if self.take("_"):
            return None
        name = self.variable()
        if self.take(":"):
            start, type = self.at, self.type()
            known = program.variables.setdefault(name, Variable(name, type, Kind.TEMP, {}, program))
            if known.type != type:
                self.at = start
                raise self.error(f"{known.type}, as %{name} was declared")
        return name

    def variable(self, unless: Any = ()) -> str:
        if not self.next.startswith("%") or not LABEL.fullmatch(self.next[1:]):
            raise self.error("a variable, % and letters, digits and _ . @ / -")
        if self.next[1:] in unless:
            raise self.error("another name: this one is declared already")
        return self.read("")[1:]

    def type(self) -> Type:
        dtype = self.read("a type such as float32[batch, 8]", NAME)
        if not self.next.startswith("["):
            return Type(dtype)
        if not self.next.endswith("]"):
            raise self.error("a shape such as [batch, 8]")
        dims: list[Dim] = []
        for text in _dims(self.next[1:-1]):
            if not DIM.fullmatch(text):
                raise self.error("dimensions: numbers, or expressions such as 2*batch")
            dims.append(self.number(text) if _INTEGER.fullmatch(text) else text)
        self.at += 1
        return Type(dtype, tuple(dims))

    def attrs(self) -> dict[str, Arg]:
        found: dict[str, Arg] = {}
        if self.take("{"):
            while not self.take("}"):
                name = self.label(unless=found)
                self.need("=")
                found[name] = self.value(0)
                if self.next != "}":
                    self.need(",")
        return found

    def values(self, depth: int) -> tuple[Arg, ...]:
        """Reads up to the closing parenthesis; inside of a value, one value without a comma is no tuple."""
        found: list[Arg] = []
        while not self.take(")"):
            found.append(self.value(depth))
            if self.next != ")" or (depth and len(found) == 1):
                self.need(",")
        return tuple(found)

    def value(self, depth: int) -> Arg:
        if self.take("("):
            if depth == MAX_DEPTH:
                raise self.error(f"tuples nested at most {MAX_DEPTH} deep")
            return self.values(depth + 1)
        if self.next.startswith("%"):
            return Ref(self.variable())
        if self.next.startswith('"'):
            return self.label()
        if _INTEGER.fullmatch(self.next):
            number = self.number(self.next)
            self.at += 1
            return number
        if _FLOAT.fullmatch(self.next):
            return float(self.read(""))
        symbol = self.read("a value", _SYMBOL)
        return _WORDS[symbol] if symbol in _WORDS else Sym(symbol)

    def number(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:  # Python bounds the digits that it reads
            raise self.error("a number of fewer digits") from None

    def label(self, unless: Any = ()) -> str:
        """A name, or a string."""
        text = self.next
        if text.startswith('"'):
            try:
                text = _STRINGS.decode(text)
            except json.JSONDecodeError as error:
                raise self.error(f"a string of JSON ({error.msg})") from None
        elif not LABEL.fullmatch(text):
            raise self.error("a name")
        if text in unless:
            raise self.error("another name: this one stands here already")
        self.at += 1
        return text

    # -- tokens ---------------------------------------------------------------------------------------------------

    @property
    def next(self) -> str:
        """The next token; "" at the end."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, token: str) -> bool:
        """Reads `token` if it is the next one."""
        found = self.next == token
        self.at += found
        return found

    def need(self, token: str) -> None:
        if not self.take(token):
            raise self.error(f"`{token}`")

    def read(self, what: str, pattern: re.Pattern[str] = _TOKEN) -> str:
        token = self.next
        if not pattern.fullmatch(token):
            raise self.error(what)
        self.at += 1
        return token

    def error(self, expected: str) -> ParseError:
        found = repr(self.next) if self.next else "the end of the line"
        column = self.tokens[self.at][1] if self.next else len(self.text)
        return ParseError(
            f"{self.place}:{column + 1}: expected {expected}, got {found}\n  {self.text}",
            rule="syntax",
            help="docs/language.md shows the form of a program",
        )


def _dims(text: str) -> list[str]:
    """Splits a shape at the commas that stand in no parentheses."""
    parts, depth = [""], 0
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts] if text.strip() else []
