"""The programs of a job, and the pipeline of passes that rewrites them.

A pass is a frozen dataclass whose fields are its options. It gets valid programs and returns valid programs, new
ones: what it was given stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from graphft.ir import Program
from graphft.ir.verify import verify


@dataclass(frozen=True)
class Programs:
    """One program per role. Until `split-optimizer` has run, `trainer` is the user's program, whole."""

    trainer: Program
    pservers: tuple[Program, ...] = ()
    coordinator: Program | None = None
    evaluation: Program | None = None
    """What trainers validate with, beside their own program."""

    def by_name(self) -> dict[str, Program]:
        """`trainer`, `pserver0`, `pserver1` ..., `coordinator`, `evaluation`."""
        named = {"trainer": self.trainer} | {f"pserver{i}": p for i, p in enumerate(self.pservers)}
        more = {"coordinator": self.coordinator, "evaluation": self.evaluation}
        return named | {name: program for name, program in more.items() if program is not None}

    def clone(self) -> Programs:
        """Deep copies, to rewrite; initial values are shared."""
        return Programs(
            self.trainer.clone(),
            tuple(p.clone() for p in self.pservers),
            self.coordinator.clone() if self.coordinator is not None else None,
            self.evaluation.clone() if self.evaluation is not None else None,
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.by_name().values()))


class Pass(Protocol):
    """A rewriting of the programs. `name` is what errors and `graphft show --passes` call it."""

    name: ClassVar[str]

    def run(self, job: Programs) -> Programs:
        """The programs after the pass. Raises ProgramError when it cannot be applied."""


@dataclass(frozen=True)
class Stage:
    """The programs as they were after a pass."""

    after: str
    programs: Programs


def run_passes(program: Program, passes: Sequence[Pass], evaluation: Program | None = None) -> tuple[Stage, ...]:
    """Runs the passes in order, verifying every program before the first and after each. The last stage is the result.

    Raises VerificationError, naming the pass, when the user's program or what a pass made of it is not well-formed.
    """
    stages = [Stage("", Programs(program, evaluation=evaluation))]
    for given in stages[0].programs.by_name().values():
        verify(given)
    for p in passes:
        programs = p.run(stages[-1].programs)
        for made in programs.by_name().values():
            verify(made, after=p.name)
        stages.append(Stage(p.name, programs))
    return tuple(stages)


def order_blocks(program: Program, *first: str) -> None:
    """Puts the blocks named `first` (those that are there) before the others, for reading."""
    order = [n for n in first if n in program.blocks] + [n for n in program.blocks if n not in first]
    program.blocks = {n: program.blocks[n] for n in order}
