"""What all roles share: a member of the job, the program's blocks, the daemon block, and how the process ends."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.ir import Program, registry
from graphft.ops.context import Context, ViewPort
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import Session, Store
from graphft.runtime.process.progress import Progress
from graphft.runtime.process.threads import prepare_structs
from graphft.runtime.roles.blocks import Blocks, DaemonBlock
from graphft.runtime.roles.process_end import ProcessEnd
from graphft.runtime.roles.session import MemberSession

if TYPE_CHECKING:
    from graphft.transpiler import Job


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
        self.ctx = Context(device=job.config.device)
        self.blocks = Blocks(program, self.ctx, progress)
        self.end = ProcessEnd(self.member, self.job_dir)
        self.daemon = DaemonBlock(self.blocks, self.member, self.end)
        self.session = self.ctx.session = MemberSession(self.member, self.end, self.status)

    def on_sigterm(self, leave: Callable[[], None]) -> None:
        """Sets a handler, which takes no lock: the signal may have interrupted code that holds it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: leave())

    def open_session(self) -> None:
        """Gets this process's lease, if its program keeps one alive.

        As the last thing before it renews it and makes its claims: what takes long and needs no claim (opening the
        data) comes before.
        """
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
