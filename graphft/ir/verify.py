"""The verifier: a list of named rules, shared ones, ones per role, and ones across the programs of a job.

A rule is a generator of `Diagnostic`s; a test breaks each. The shared rules stand in `graphft.ir.rules`. The
package that makes a role's program adds that role's rules:

    @rule("barrier-count", "a trainer's barriers wait for every shard", role="trainer")
    def _barriers(program: Program, options: Options) -> Iterator[Diagnostic]:
        ...
        yield Diagnostic("barrier-count", "send_barrier counts 1 shard, the job has 2", "...", block, i)

    @job_rule("slice-cover", "the slices of a parameter cover it exactly once")
    def _cover(programs: Mapping[str, Program]) -> Iterator[Diagnostic]: ...
"""

from __future__ import annotations

from collections.abc import Mapping

import graphft.ir.rules  # noqa: F401  registers the shared ones
from graphft.ir import Program
from graphft.ir.diagnostics import JOB_RULES, RULES, Diagnostic, JobRule, Options, Rule, VerificationError


def rules(role: object = None) -> list[Rule]:
    """The shared rules, and those of `role`, in the order in which they report."""
    return [r for r in RULES if r.role is None or r.role == role]


def job_rules() -> list[JobRule]:
    """The rules across the programs of a job."""
    return list(JOB_RULES)


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
    errors = [d for r in JOB_RULES for d in r.check(programs) if d.severity == "error"]
    if errors:
        raise VerificationError(errors, f"job of programs {', '.join(programs)}", after)
