"""The blocks of a role's program: each is made a function once; the daemon block runs on a thread of its own."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from graphft.ir import Block, Program
from graphft.ops.context import Context
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import LeaseLost, TransientEtcdError
from graphft.runtime.execute.lowering import Lowered, lower
from graphft.runtime.process.progress import Progress
from graphft.runtime.process.role_process import EXIT_FAILED
from graphft.runtime.roles.logs import BLOCKS
from graphft.runtime.roles.process_end import ProcessEnd

log = logging.getLogger("graphft")

SHORTEST_SECONDS = 0.05
"""Between two looks at a lease that is due."""


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


class DaemonBlock:
    """Runs block `daemon`, if there is one, when the view has changed, when the lease is to be renewed, and at least
    once in the block's interval."""

    def __init__(self, blocks: Blocks, member: Member, end: ProcessEnd) -> None:
        self.blocks, self.member, self.end = blocks, member, end
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if "daemon" in self.blocks.program.blocks:
            self._thread = threading.Thread(target=self._run, name="daemon block", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        block, ctx, member = self.blocks.program.blocks["daemon"], self.blocks.ctx, self.member
        run = self.blocks.lowered(block)
        while not self.end.closing.is_set():
            try:
                run(ctx, ctx.scope)
                member.events.again()
            except LeaseLost as error:
                self.end.lease_lost(error)
            except TransientEtcdError as error:
                log.warning("etcd: %s", error.message)  # the lease's own deadline decides how long this may last
            except BaseException:
                log.exception("the daemon block failed; a process without it must not go on")
                self.end.now(EXIT_FAILED)
            due = member.session.due() if member.session is not None else math.inf
            member.changed.wait(min(float(block.attrs["interval"]), member.progress.left(), max(due, SHORTEST_SECONDS)))
            member.changed.clear()

    def join(self) -> None:
        """Returns when the block has ended; the role closes."""
        self.member.changed.set()
        if self._thread is not None:
            self._thread.join()
