"""Reads a program's text back: `parse(format_program(p)) == p`. The grammar stands in `graphft.ir.printer`.

A recursive-descent parser over lines. Text may come from anywhere: nothing of it is evaluated, and every error
says where it is.
"""

from __future__ import annotations

import json
import re

from graphft.errors import GraphftError
from graphft.ir import Arg, Block, Dim, Kind, Operator, Program, Ref, Sym, Type, Variable
from graphft.ir.printer import DIM, LABEL, NAME, SYMBOL

MAX_DEPTH = 64
"""Tuples nested deeper than this are refused (the parser recurses)."""

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]+(\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?![A-Za-z0-9_.@/:-])")
_OP_START = re.compile(r"[%_]|[A-Za-z_][A-Za-z0-9_.]*[ \t]*\(")
_RESULT_START = re.compile(r"%|_(?![A-Za-z0-9_.]*[ \t]*\()")
_BLOCK_START = re.compile(r"block[ \t]+[^ \t(]")
_SPACE = re.compile(r"[ \t]*(?:#.*)?")
_FOUND = re.compile(r"%?[A-Za-z0-9_.@/-]+|.")
_WORDS = {"true": True, "false": False, "none": None}
_KINDS = {k.value: k for k in Kind}
_STRINGS = json.JSONDecoder(strict=False)


class ParseError(GraphftError):
    """Text that is no program. `line` and `column` count from 1."""

    def __init__(self, message: str, *, source: str, line: int, column: int, text: str) -> None:
        self.source, self.line, self.column, self.text = source, line, column, text
        super().__init__(message, rule="syntax", help="docs/language.md shows the form of a program")

    def render(self) -> str:
        gutter = " " * len(f" {self.line:3d}")
        pointer = re.sub(r"[^\t]", " ", self.text[: self.column - 1]) + "^"
        return (
            f"error[{self.rule}]: {self.message}\n"
            f"  --> {self.source}:{self.line}:{self.column}\n"
            f" {self.line:3d} | {self.text}\n"
            f"{gutter} | {pointer}\n"
            f"help: {self.help}"
        )


def parse(text: str, source: str = "<text>") -> Program:
    """The program that `text` holds; `source` names it in errors. Raises ParseError.

    Only the form is checked. What the program means (ops, types, order) is for `graphft.ir.verify` to say.
    """
    program: Program | None = None
    block: Block | None = None
    lines = text.split("\n")
    for number, content in enumerate(lines, 1):
        line = _Line(content.removesuffix("\r"), number, source)
        if line.at_end():
            continue
        if program is None:
            program = line.header()
        elif line.starts(_BLOCK_START):
            block = line.block_head(program)
        elif line.starts(_OP_START):
            if block is None:
                raise line.error("an op stands outside of any block: put `block step:` on a line before it")
            block.ops.append(line.operator(program))
        elif block is not None:
            raise line.error("expected an op or a block: declarations stand before the first block")
        else:
            line.declaration(program)
        line.end()
    if program is None:
        raise _Line(lines[-1], len(lines), source).error("expected `program NAME`, got the end of the text")
    return program


class _Line:
    """One line, and how far it has been read."""

    def __init__(self, text: str, number: int, source: str) -> None:
        self.text, self.number, self.source, self.at = text, number, source, 0

    # -- the grammar's rules --------------------------------------------------------------------------------------

    def header(self) -> Program:
        if not self.word("program"):
            raise self.error(f"expected `program NAME`, got {self.found()}")
        return Program(self.label("the program's name"), self.attrs())

    def starts(self, pattern: re.Pattern[str]) -> bool:
        return pattern.match(self.text, self.at) is not None

    def block_head(self, program: Program) -> Block:
        self.word("block")
        start = self.skip()
        name = self.label("the block's name")
        if name in program.blocks:
            raise self.error(f"block {name} stands here a second time", at=start)
        block = program.block(name)
        block.attrs = self.attrs()
        self.need(":", "':' after the block's head")
        return block

    def declaration(self, program: Program) -> None:
        start = self.skip()
        kind = self.match(NAME)
        if kind not in _KINDS:
            self.at = start
            raise self.error(f"expected an op, a block or a declaration ({', '.join(_KINDS)}), got {self.found()}")
        start = self.skip()
        name = self.variable()
        self.need(":", "':' and the variable's type")
        if name in program.variables:
            raise self.error(f"variable %{name} is declared twice", at=start)
        program.variables[name] = Variable(name, self.type(), _KINDS[kind], self.attrs(), program)

    def operator(self, program: Program) -> Operator:
        outputs: list[str | None] = []
        if self.starts(_RESULT_START):
            outputs.append(self.result(program))
            while self.take(","):
                outputs.append(self.result(program))
            self.need("=", "'=' or ',' after a result")
        op = self.match(NAME)
        if not op:
            raise self.error(f"expected the name of an op, got {self.found()}")
        self.need("(", f"'(' after {op}")
        args = self.values(")", 0)[0]
        return Operator(op, args, self.attrs(), tuple(outputs))

    def result(self, program: Program) -> str | None:
        start = self.skip()
        if self.word("_"):
            return None
        name = self.variable()
        if self.take(":"):
            var = Variable(name, self.type(), Kind.TEMP, {}, program)
            known = program.variables.setdefault(name, var)
            if known.type != var.type:
                raise self.error(f"%{name} is {var.type} here, but {known.type} where it was declared", at=start)
        return name

    def variable(self) -> str:
        self.need("%", "a variable (%name)")
        name = LABEL.match(self.text, self.at)
        if name is None:
            raise self.error("expected a name after %, of letters, digits and _ . @ / -")
        self.at = name.end()
        return name[0]

    def type(self) -> Type:
        dtype = self.match(NAME)
        if not dtype:
            raise self.error(f"expected a type such as float32[batch, 8], got {self.found()}")
        if not self.take("["):
            return Type(dtype)
        dims: list[Dim] = []
        while not self.take("]"):
            if dims:
                self.need(",", "',' or ']' after a dimension")
            dims.append(self.dim())
        return Type(dtype, tuple(dims))

    def dim(self) -> Dim:
        start = end = self.skip()
        depth = 0
        while end < len(self.text) and (depth or self.text[end] not in ",]"):
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            end += 1
        text = self.text[start:end].strip()
        if not DIM.fullmatch(text):
            raise self.error(f"expected a dimension: a number, or an expression such as 2*batch, got {self.found()}")
        self.at = end
        return self.integer(text, start) if _INTEGER.fullmatch(text) else text

    def attrs(self) -> dict[str, Arg]:
        found: dict[str, Arg] = {}
        if not self.take("{"):
            return found
        while not self.take("}"):
            if found:
                self.need(",", "',' or '}' after an attribute")
            start = self.skip()
            name = self.label("an attribute's name")
            if name in found:
                raise self.error(f"attribute {name} is given twice", at=start)
            self.need("=", f"'=' after {name}")
            found[name] = self.value(0)
        return found

    def values(self, end: str, depth: int) -> tuple[tuple[Arg, ...], bool]:
        """Values up to `end`, and whether a comma stands behind the last one."""
        found: list[Arg] = []
        comma = False
        while not self.take(end):
            if found and not comma:
                raise self.error(f"expected ',' or {end!r}, got {self.found()}")
            found.append(self.value(depth))
            comma = self.take(",")
        return tuple(found), comma

    def value(self, depth: int) -> Arg:
        start = self.skip()
        if self.text[start : start + 1] == "%":
            return Ref(self.variable())
        if self.text[start : start + 1] == '"':
            return self.string()
        if self.take("("):
            if depth == MAX_DEPTH:
                raise self.error(f"tuples are nested more than {MAX_DEPTH} deep", at=start)
            values, comma = self.values(")", depth + 1)
            if len(values) == 1 and not comma:
                raise self.error("a value in parentheses is no tuple: write (value,) with a comma", at=start)
            return values
        number = self.match(_NUMBER)
        if number:
            return self.integer(number, start) if _INTEGER.fullmatch(number) else float(number)
        symbol = self.match(SYMBOL)
        if not symbol:
            raise self.error(f"expected a value, got {self.found()}")
        return _WORDS[symbol] if symbol in _WORDS else Sym(symbol)

    def integer(self, text: str, start: int) -> int:
        try:
            return int(text)
        except ValueError:  # Python bounds the digits that it reads
            raise self.error(f"a number of {len(text)} digits is too long", at=start) from None

    def string(self) -> str:
        try:
            text, self.at = _STRINGS.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            raise self.error(f"this is no string of JSON: {error.msg}", at=error.pos) from None
        return str(text)

    def label(self, what: str) -> str:
        if self.text[self.skip() :][:1] == '"':
            return self.string()
        found = self.match(LABEL)
        if not found:
            raise self.error(f"expected {what}, got {self.found()}")
        return found

    # -- characters -----------------------------------------------------------------------------------------------

    def skip(self) -> int:
        """Skips blanks and a comment; returns the position."""
        space = _SPACE.match(self.text, self.at)
        self.at = space.end() if space else self.at
        return self.at

    def at_end(self) -> bool:
        return self.skip() == len(self.text)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Reads what `pattern` matches here; '' when it does not."""
        found = pattern.match(self.text, self.skip())
        if found is None:
            return ""
        self.at = found.end()
        return found[0]

    def take(self, char: str) -> bool:
        if not self.text.startswith(char, self.skip()):
            return False
        self.at += len(char)
        return True

    def word(self, word: str) -> bool:
        """Reads `word` if it stands here whole."""
        start = self.skip()
        if self.match(LABEL) == word:
            return True
        self.at = start
        return False

    def need(self, char: str, what: str) -> None:
        if not self.take(char):
            raise self.error(f"expected {what}, got {self.found()}")

    def end(self) -> None:
        if not self.at_end():
            raise self.error(f"expected the end of the line, got {self.found()}")

    def found(self) -> str:
        token = _FOUND.match(self.text, self.skip())
        return repr(token[0]) if token else "the end of the line"

    def error(self, message: str, at: int | None = None) -> ParseError:
        column = (self.skip() if at is None else at) + 1
        return ParseError(message, source=self.source, line=self.number, column=column, text=self.text)
