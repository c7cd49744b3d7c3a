"""The verifier: a list of named rules for every program, and one across the programs of a job.

A rule is a generator of `Diagnostic`s; a test breaks each. The package that makes a job's programs adds its rules:

    @job_rule("slice-cover", "the slices of a parameter cover it exactly once")
    def _cover(programs: Mapping[str, Program]) -> Iterator[Diagnostic]:
        ...
        yield Diagnostic("slice-cover", "%w has 8 elements, its slices end at 4", "transpile the program again")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Block, Kind, Operator, Program, Type, registry


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding of a rule. `block` and `index` say where, if it concerns an op."""

    rule: str
    message: str
    help: str = ""
    block: Block | None = None
    index: int | None = None

    def __str__(self) -> str:
        where = f"{self.block.program.name}, block {self.block.name}" if self.block is not None else ""
        where += f", op {self.index}" if self.index is not None else ""
        return f"error[{self.rule}]: {self.message}" + f" ({where})" * bool(where)


class Rule(NamedTuple):
    """A named rule, over a program or over all programs of a job, by name (`trainer`, `pserver0` ...)."""

    id: str
    description: str
    check: Callable[[Any], Iterator[Diagnostic]]


class VerificationError(ProgramError):
    """A program (or job) that breaks rules. Shows the first finding in full, and lists the others."""

    def __init__(self, found: list[Diagnostic], program: str, after: str = "") -> None:
        self.diagnostics, self.program = found, program
        first = found[0]
        super().__init__(
            first.message, block=first.block, index=first.index, rule=first.rule, help=first.help, after=after
        )

    def render(self) -> str:
        lines = [super().render()]
        if self.block is None:
            head, *rest = lines[0].split("\n")
            behind = f" (after pass {self.after})" if self.after else ""
            lines = [head, f"  --> {self.program}{behind}", *rest]
        others = self.diagnostics[1:]
        if others:
            lines += [f"and {len(others)} more:", *(f"  {d}" for d in others)]
        return "\n".join(lines)


RULES: list[Rule] = []
JOB_RULES: list[Rule] = []
Checker = TypeVar("Checker", bound=Callable[[Any], Iterator[Diagnostic]])


def rule(id: str, description: str) -> Callable[[Checker], Checker]:
    """Adds the decorated check to the rules of every program."""

    def add(check: Checker) -> Checker:
        RULES.append(Rule(id, description, check))
        return check

    return add


def job_rule(id: str, description: str) -> Callable[[Checker], Checker]:
    """Adds the decorated check to the rules across the programs of a job."""

    def add(check: Checker) -> Checker:
        JOB_RULES.append(Rule(id, description, check))
        return check

    return add


def check(program: Program, *, require_values: bool = False) -> list[Diagnostic]:
    """Everything the rules find in `program`; with `require_values`, persistent variables without a value, too."""
    found = [d for r in RULES for d in r.check(program)]
    return found + list(_missing_values(program)) * require_values


def verify(program: Program, *, require_values: bool = False, after: str = "") -> None:
    """Raises VerificationError, which lists every error, unless `program` is well-formed.

    `after` names the pass that made the program, for the error.
    """
    if found := check(program, require_values=require_values):
        raise VerificationError(found, f"program '{program.name}'", after)


def verify_job(programs: Mapping[str, Program]) -> None:
    """Verifies each program of a job, then what must hold across them. Raises VerificationError."""
    for program in programs.values():
        verify(program)
    if found := [d for r in JOB_RULES for d in r.check(programs)]:
        raise VerificationError(found, f"job of programs {', '.join(programs)}")


# -- ops against their definitions --------------------------------------------------------------------------------


def _ops(program: Program) -> Iterator[tuple[Block, int, Operator]]:
    for block in program.blocks.values():
        for i, op in enumerate(block.ops):
            yield block, i, op


@rule("definition", "operands, attributes and results are those of the op's definition; each finding has its own rule")
def _definition(program: Program) -> Iterator[Diagnostic]:
    for block, i, op in _ops(program):
        try:
            yield from _results(op, block, i, registry.infer(op, block))
        except GraphftError as error:
            yield Diagnostic(error.rule or "type-mismatch", error.message, error.help, block, i)


def _results(op: Operator, block: Block, index: int, types: Sequence[Type]) -> Iterator[Diagnostic]:
    if len(types) != len(op.outputs):
        message = f"{op.type} has {len(types)} results, here it is given {len(op.outputs)} names"
        yield Diagnostic("results", message, "name each result, or write _ for one not wanted", block, index)
        return
    for name, inferred in zip(op.outputs, types, strict=True):
        declared = block.program.variables.get(name) if name is not None else None
        if name is not None and declared is None:
            message, help = f"{op.type} writes %{name}, which is not declared", "give its type where an op produces it"
            yield Diagnostic("undeclared", message, help, block, index)
        elif declared is not None and not _same_type(declared.type, inferred):
            message = f"%{name} is declared {declared.type}, but {op.type} gives {inferred}"
            yield Diagnostic("type-mismatch", message, "correct the declaration, or the op's operands", block, index)


def _same_type(declared: Type, inferred: Type) -> bool:
    """Equal, where the expressions of symbolic dimensions are the same but for blanks."""
    return str(declared).replace(" ", "") == str(inferred).replace(" ", "")


# -- order --------------------------------------------------------------------------------------------------------

ROUND: dict[str, tuple[str, ...]] = {"reduce": ("schedule",), "optimize": ("schedule", "reduce"), "local": ("step",)}
"""Blocks that listen_and_serv runs one after the other in a round, or local_steps inside one: each also reads the
temporaries of these."""


@rule("read-before-write", "a temporary is written before it is read")
def _read_before_write(program: Program) -> Iterator[Diagnostic]:
    for block in program.blocks.values():
        written = _given(block) | {name for op in block.ops for name in op.writes}
        for i, op in enumerate(block.ops):
            for name in op.reads:
                if not _is_temp(name, program) or name in written:
                    continue
                elsewhere = [b.name for b in program.blocks.values() if any(name in o.writes for o in b.ops)]
                message = f"%{name} is read by {op.type}, but nothing in block {block.name} writes it"
                message += f": it is a temporary of block {elsewhere[0]}" if elsewhere else ""
                help = "produce it by an op before this one, or declare it as an input"
                yield Diagnostic("read-before-write", message, help, block, i)


@rule("out-of-order", "an op stands behind the ops whose results it reads")
def _out_of_order(program: Program) -> Iterator[Diagnostic]:
    for block in program.blocks.values():
        first = {name: i for i, op in reversed(list(enumerate(block.ops))) for name in op.writes}
        known = _given(block)
        for i, op in enumerate(block.ops):
            for name in op.reads:
                if _is_temp(name, program) and name not in known and name in first:
                    what = f"%{name} is read by {op.type}, but written only later, by op {first[name]}"
                    help = "move the op behind it; where each waits for the other, let one read another variable"
                    yield Diagnostic("out-of-order", what, help, block, i)
            known.update(op.writes)


def _given(block: Block) -> set[str]:
    """Temporaries that blocks which run before this one, in the same round, leave for it."""
    before = ROUND.get(block.name.split(".", 1)[0], ())
    return {n for b in block.program.blocks.values() if b.name in before for op in b.ops for n in op.writes}


def _is_temp(name: str, program: Program) -> bool:
    return name in program.variables and program.variables[name].kind is Kind.TEMP


@rule("redefined", "a temporary is the result of one op of its block")
def _redefined(program: Program) -> Iterator[Diagnostic]:
    for block in program.blocks.values():
        by: dict[str, int] = {}
        for i, op in enumerate(block.ops):
            for name in op.writes:
                if name in by and _is_temp(name, program):
                    message = f"%{name} is the result of {op.type}, and of op {by[name]} before"
                    yield Diagnostic("redefined", message, "give one of them another name", block, i)
                by.setdefault(name, i)


@rule("constant-write", "what never changes (frozen, const) is not written")
def _constant_write(program: Program) -> Iterator[Diagnostic]:
    for block, i, op in _ops(program):
        for name in dict.fromkeys(registry.writes_of(op)):
            v = program.variables.get(name)
            if v is not None and v.kind in (Kind.FROZEN, Kind.CONST):
                message = f"{op.type} writes %{name}, which is {v.kind.value}: the same in every process and step"
                yield Diagnostic("constant-write", message, "declare it as a buffer, or write to a copy", block, i)


# -- values -----------------------------------------------------------------------------------------


@rule("value-type", "an initial value has the type of its variable")
def value_types(program: Program) -> Iterator[Diagnostic]:
    """Findings about `program.values`."""
    for name, value in program.values.items():
        v = program.variables.get(name)
        given = Type(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if v is None or v.type != given:
            declared = "not declared" if v is None else f"declared {v.type}"
            message = f"%{name} is {declared}, but its value is {given}"
            yield Diagnostic("value-type", message, "correct the declaration, or the value")


def _missing_values(program: Program) -> Iterator[Diagnostic]:
    for v in program.variables.values():
        if v.kind.persistent and v.name not in program.values:
            message = f"{v.kind.value} %{v.name} has no initial value"
            yield Diagnostic("missing-value", message, "set program.values[name], or load the program with its values")
