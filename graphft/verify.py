"""The verifier: a list of named rules, shared ones, ones per role, and ones across the programs of a job.

A rule is a generator of `Diagnostic`s; a test breaks each. The shared rules stand in `graphft.rules`. Whoever makes a
role's program adds that role's rules beside it:

    @rule("barrier-count", "a trainer's barriers wait for every shard", role="trainer")
    def _barriers(program: Program, options: Options) -> Iterator[Diagnostic]:
        ...
        yield Diagnostic("barrier-count", "send_barrier counts 1 shard, the job has 2", "...", block, i)

    @job_rule("slice-cover", "the slices of a parameter cover it exactly once")
    def _cover(programs: Mapping[str, Program]) -> Iterator[Diagnostic]: ...
"""

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


_RULES: list[Rule] = []
_JOB_RULES: list[JobRule] = []


def rule(id: str, description: str, role: str | None = None) -> Callable[[Check], Check]:
    """Adds the decorated check to the rules of every program, or of those of one role."""

    def add(check: Check) -> Check:
        if any(r.id == id and r.role == role for r in _RULES):
            raise ValueError(f"rule {id} is defined twice")
        _RULES.append(Rule(id, description, check, role))
        return check

    return add


def job_rule(id: str, description: str) -> Callable[[JobCheck], JobCheck]:
    """Adds the decorated check to the rules across the programs of a job."""

    def add(check: JobCheck) -> JobCheck:
        if any(r.id == id for r in _JOB_RULES):
            raise ValueError(f"rule {id} is defined twice")
        _JOB_RULES.append(JobRule(id, description, check))
        return check

    return add


def rules(role: object = None) -> list[Rule]:
    """The shared rules, and those of `role`, in the order in which they report."""
    import graphft.rules  # noqa: F401  registers the shared ones

    return [r for r in _RULES if r.role is None or r.role == role]


def job_rules() -> list[JobRule]:
    """The rules across the programs of a job."""
    return list(_JOB_RULES)


def check(
    program: Program, *, strict: bool = False, require_values: bool = False, fetch: tuple[str, ...] = ()
) -> list[Diagnostic]:
    """Everything the rules find in `program`, warnings included. See `Options` for what can be asked."""
    options = Options(strict, require_values, fetch)
    return [d for r in rules(program.attrs.get("role")) for d in r.check(program, options)]


def verify(
    program: Program,
    *,
    strict: bool = False,
    require_values: bool = False,
    fetch: tuple[str, ...] = (),
    after: str = "",
) -> None:
    """Raises VerificationError, which lists every error, unless `program` is well-formed.

    `after` names the pass that made the program, for the error.
    """
    found = check(program, strict=strict, require_values=require_values, fetch=fetch)
    errors = [d for d in found if d.severity == "error"]
    if errors:
        raise VerificationError(errors, f"program '{program.name}'", after)


def verify_job(programs: Mapping[str, Program], *, require_values: bool = False, after: str = "") -> None:
    """Verifies each program of a job, then what must hold across them. Raises VerificationError."""
    for program in programs.values():
        verify(program, require_values=require_values, after=after)
    errors = [d for r in _JOB_RULES for d in r.check(programs) if d.severity == "error"]
    if errors:
        raise VerificationError(errors, f"job of programs {', '.join(programs)}", after)
