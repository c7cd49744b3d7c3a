"""The daemon block of a role's program: run again and again, on a thread of its own, until the role closes."""

from __future__ import annotations

import logging
import math
import threading

from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import LeaseLost, TransientEtcdError
from graphft.runtime.process.role_process import EXIT_FAILED
from graphft.runtime.roles.blocks import Blocks
from graphft.runtime.roles.process_end import ProcessEnd

log = logging.getLogger("graphft")

SHORTEST_SECONDS = 0.05
"""Between two looks at a lease that is due."""


class DaemonBlock:
    """Runs when the view changed, when the lease is to be renewed, and at least once in the block's interval."""

    def __init__(self, blocks: Blocks, member: Member, end: ProcessEnd) -> None:
        self.blocks, self.member, self.end = blocks, member, end
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Does nothing if the program has no such block."""
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
        """Returns when it has ended; the role closes."""
        self.member.changed.set()
        if self._thread is not None:
            self._thread.join()
