"""The programs of a job, and how passes rewrite them.

A pass is a function of the programs and the job's options. It gets valid programs, a copy, and leaves valid programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphft.ir import Kind, Program, Type, Variable
from graphft.ir.verify import verify

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig


@dataclass
class Programs:
    """One program per role. Until `split-optimizer` has run, `trainer` is the user's program, whole."""

    trainer: Program
    pservers: tuple[Program, ...] = ()
    coordinator: Program | None = None
    evaluation: Program | None = None
    """Trainers validate with it, beside their own program."""

    def by_name(self) -> dict[str, Program]:
        """Returns `trainer`, `pserver0`, `pserver1` ..., `coordinator`, `evaluation`."""
        named = {"trainer": self.trainer} | {f"pserver{i}": p for i, p in enumerate(self.pservers)}
        more = {"coordinator": self.coordinator, "evaluation": self.evaluation}
        return named | {name: program for name, program in more.items() if program is not None}

    def clone(self) -> Programs:
        """Returns deep copies, to rewrite; initial values are shared."""
        coordinator, evaluation = (p and p.clone() for p in (self.coordinator, self.evaluation))
        return Programs(self.trainer.clone(), tuple(p.clone() for p in self.pservers), coordinator, evaluation)

    def __str__(self) -> str:
        return "\n".join(map(str, self.by_name().values()))


Pass = Callable[[Programs, "JobConfig"], None]


@dataclass(frozen=True)
class Stage:
    """The programs as they were after a pass."""

    after: str
    programs: Programs


def run_passes(
    program: Program, passes: Sequence[Pass], config: JobConfig, evaluation: Program | None = None
) -> tuple[Stage, ...]:
    """Runs the passes in order, verifying every program before the first and after each. The last stage is the result.

    Raises VerificationError, naming the pass, when the user's program or what a pass made of it is not well-formed.
    """
    stages = [Stage("", Programs(program, evaluation=evaluation))]
    for given in stages[0].programs.by_name().values():
        verify(given)
    for rewrite in passes:
        programs, name = stages[-1].programs.clone(), rewrite.__name__.replace("_", "-")
        rewrite(programs, config)
        for made in programs.by_name().values():
            verify(made, after=name)
        stages.append(Stage(name, programs))
    return tuple(stages)


def order_blocks(program: Program, *first: str) -> None:
    """Puts the blocks named `first` (those that are there) before the others, for reading."""
    order = [n for n in first if n in program.blocks] + [n for n in program.blocks if n not in first]
    program.blocks = {n: program.blocks[n] for n in order}


def chunk_variable(program: Program, stem: str) -> str:
    """Declares a variable for a chunk, a range or a batch of one; returns its name."""
    name = program.fresh(stem)
    program.variables[name] = Variable(name, Type("chunk"), Kind.TEMP, {}, program)
    return name
