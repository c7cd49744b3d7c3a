"""The base of all roles: a member of the job that runs the blocks of its program."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from graphft.ir import Block, Program, registry
from graphft.ops.context import Context, ViewPort
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import LeaseLost, Session, Store, TransientEtcdError
from graphft.runtime.execute.lowering import Lowered, lower
from graphft.runtime.process.progress import Progress
from graphft.runtime.process.role_process import EXIT_FAILED
from graphft.runtime.process.threads import prepare_structs
from graphft.runtime.roles.logs import BLOCKS
from graphft.runtime.roles.session import MemberSession, ProcessEnd

if TYPE_CHECKING:
    from graphft.transpiler.job import Job

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


class SeenView(ViewPort):
    """The ViewPort of a pserver and of a coordinator. `seen`: the view as op `etcd_state_watch` took it in last, which
    the main thread acts on."""

    def __init__(self, member: Member) -> None:
        self.member, self.seen = member, JobView()

    def watch(self) -> None:
        self.seen = self.member.view
        self.member.wake()


class Role:
    """One process of a job. Subclasses make the other ports of its context, and run the blocks of its program."""

    kind = ""

    def __init__(
        self, job: Job, job_dir: Path, program: Program, etcd: Store, index: int, session: Session | None = None
    ) -> None:
        prepare_structs()  # before the first thread of this role
        self.job, self.config, self.program, self.job_dir = job, job.config, program, Path(job_dir)
        keep = program.find_op("etcd_keep_alive")
        self._leased = keep is not None
        # Marked by the main thread; the daemon thread ends a process that does not get on.
        progress = Progress(registry.attr(keep, "progress_timeout") if keep is not None else math.inf)
        self.member = Member(self.kind, index, etcd, job, progress, session)
        self.ctx = Context(device=self.device(index))
        self.blocks = Blocks(program, self.ctx, progress)
        self.end = ProcessEnd(self.member, self.job_dir)
        self.daemon = DaemonBlock(self.blocks, self.member, self.end)
        self.session = self.ctx.session = MemberSession(self.member, self.end, self.status)

    def device(self, index: int) -> str:
        """Returns the device that this process computes on: of process `index` of its role."""
        return "cpu"

    def on_sigterm(self, leave: Callable[[], None]) -> None:
        """Sets a handler, which takes no lock: the signal may have interrupted code that holds it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: leave())

    def open_session(self) -> None:
        """Gets this process's lease, if its program keeps one alive."""
        member = self.member
        if member.session is None and self._leased:
            member.session = Session(member.etcd, self.config.lease_ttl)
        if member.session is not None:
            member.progress.share(member.session.page)

    def start_daemon(self) -> None:
        if self.member.session is not None:
            self.member.session.keep(self.member.etcd.urls)
        self.daemon.start()

    def run(self) -> None:
        """Returns at the end of the job."""
        raise NotImplementedError

    def unready(self) -> str:
        """Says why others cannot count on this process now; "" if they can."""
        return "" if self.session.registered else "it is not registered"

    @property
    def at_step(self) -> int | None:
        """The step (a shard: the version) that this process is at; None before it has begun."""
        return None

    def story(self) -> list[str]:
        """Returns what this role's state machine has taken in of late, oldest first; nothing if it has none."""
        return []

    def status(self) -> msgspec.Struct:
        """Returns what displays show of this process."""
        raise NotImplementedError

    def close(self) -> None:
        self.end.closing.set()
        self.daemon.join()
        self.member.close()
