"""Errors that say what, where, expected against got, and the remedy.

Every error that graphft raises on purpose is a `GraphftError`. One that concerns a program also carries the
place (program, block, op index) and prints the lines around it, in the style of a compiler:

    error[read-before-write]: %fc.weight@GRAD is read by send, but nothing writes it
      --> program 'trainer', block step, op 5
       4 | %loss: float32[] = aten.nll_loss_forward(...)
     > 5 | send(%fc.weight@GRAD) {shard = 0}
    help: call minimize() before transpile(), or mark fc.weight as not trainable
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphft.ir import Block


class GraphftError(Exception):
    """Base of graphft's errors. `rule` is a stable identifier, `help` the remedy."""

    def __init__(self, message: str, *, rule: str = "", help: str = "") -> None:
        self.message, self.rule, self.help = message, rule, help
        super().__init__(self.render())

    def render(self) -> str:
        head = f"error[{self.rule}]: {self.message}" if self.rule else self.message
        return head + (f"\nhelp: {self.help}" if self.help else "")


class ProgramError(GraphftError):
    """An error at a place in a program. `after` is the pass behind which it was found, if one was."""

    def __init__(
        self, message: str, *, block: Block | None = None, index: int | None = None, rule: str = "", help: str = "",
        after: str = "",
    ) -> None:
        self.block, self.index, self.after = block, index, after
        super().__init__(message, rule=rule, help=help)

    def render(self) -> str:
        head = f"error[{self.rule}]: {self.message}" if self.rule else self.message
        lines = [head]
        if self.block is not None:
            lines += _excerpt(self.block, self.index, self.after)
        if self.help:
            lines.append(f"help: {self.help}")
        return "\n".join(lines)


def _excerpt(block: Block, index: int | None, after: str, around: int = 1) -> list[str]:
    from graphft.printer import format_operator

    where = f"  --> program '{block.program.name}', block {block.name}"
    behind = f" (after pass {after})" if after else ""
    if index is None or not block.ops:
        return [where + behind]
    index = min(index, len(block.ops) - 1)
    lines = [f"{where}, op {index}{behind}"]
    for i in range(max(0, index - around), min(len(block.ops), index + around + 1)):
        mark = ">" if i == index else " "
        lines.append(f" {mark} {i:3d} | {format_operator(block.ops[i], block.program)}")
    loc = block.ops[index].loc
    if loc:
        lines.append(f"  written by {loc}")
    return lines
