"""The blocks of a role's program: each is made a function once, and run on the role's context."""

from __future__ import annotations

import logging
import time
from typing import Any

from graphft.ir import Block, Program
from graphft.ops.context import Context
from graphft.runtime.execute.lowering import Lowered, lower
from graphft.runtime.process.progress import Progress
from graphft.runtime.roles.logs import BLOCKS

log = logging.getLogger("graphft")


class Blocks:
    """A role's program and its context. `progress` is marked when a block begins."""

    def __init__(self, program: Program, ctx: Context, progress: Progress) -> None:
        self.program, self.ctx, self.progress = program, ctx, progress
        self._lowered: dict[tuple[str, tuple[str, ...], int], Lowered] = {}

    def lowered(self, block: Block, fetch: tuple[str, ...] = (), start: int = 0) -> Lowered:
        key = (block.name, fetch, start)
        if key not in self._lowered:
            self._lowered[key] = lower(block, fetch=fetch, start=start, device=self.ctx.device)
        return self._lowered[key]

    def run(self, name: str, fetch: tuple[str, ...] = (), start: int = 0) -> tuple[Any, ...]:
        """Runs a block once, from its op `start` on; does nothing if the program does not have it."""
        if name not in self.program.blocks:
            return ()
        self.progress.beat()
        began = time.perf_counter()
        results = self.lowered(self.program.blocks[name], fetch, start)(self.ctx, self.ctx.scope)
        if log.isEnabledFor(BLOCKS):
            log.log(BLOCKS, "block %s took %.2f ms", name, 1000 * (time.perf_counter() - began))
        return results
