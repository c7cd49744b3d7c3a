"""What the verifier's rules are made of: findings, rules, and where both kinds of rules are registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from graphft.errors import GraphftError, ProgramError
from graphft.ir import Block, Program


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding of a rule. `block` and `index` say where, if it concerns an op."""

    rule: str
    message: str
    help: str = ""
    block: Block | None = None
    index: int | None = None
    severity: Literal["error", "warning"] = "error"

    @staticmethod
    def of(error: GraphftError, block: Block, index: int) -> Diagnostic:
        """What a definition's own inference or check raised, as a finding about op `index`."""
        return Diagnostic(error.rule or "type-mismatch", error.message, error.help, block, index)

    def __str__(self) -> str:
        where = ""
        if self.block is not None:
            where = f" ({self.block.program.name}, block {self.block.name}" + (
                f", op {self.index})" if self.index is not None else ")"
            )
        return f"{self.severity}[{self.rule}]: {self.message}{where}"


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller asks of the rules beyond the program's form."""

    strict: bool = False
    """Dead ops are errors, not warnings."""
    require_values: bool = False
    """Persistent variables must have their initial values: the program is about to run."""
    fetch: tuple[str, ...] = ()
    """Variables that the caller will fetch: what computes them is not dead."""


Check = Callable[[Program, Options], Iterator[Diagnostic]]
JobCheck = Callable[[Mapping[str, Program]], Iterator[Diagnostic]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule. `role` limits it to programs whose attribute `role` is this."""

    id: str
    description: str
    check: Check
    role: str | None = None


@dataclass(frozen=True, slots=True)
class JobRule:
    """A named rule over all programs of a job, by name (`trainer`, `pserver0` ...)."""

    id: str
    description: str
    check: JobCheck


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
JOB_RULES: list[JobRule] = []


def rule(id: str, description: str, role: str | None = None) -> Callable[[Check], Check]:
    """Adds the decorated check to the rules of every program, or of those of one role."""

    def add(check: Check) -> Check:
        if any(r.id == id and r.role == role for r in RULES):
            raise ValueError(f"rule {id} is defined twice")
        RULES.append(Rule(id, description, check, role))
        return check

    return add


def job_rule(id: str, description: str) -> Callable[[JobCheck], JobCheck]:
    """Adds the decorated check to the rules across the programs of a job."""

    def add(check: JobCheck) -> JobCheck:
        if any(r.id == id for r in JOB_RULES):
            raise ValueError(f"rule {id} is defined twice")
        JOB_RULES.append(JobRule(id, description, check))
        return check

    return add
