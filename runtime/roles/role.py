"""What all roles share: etcd, the lease, the watched view, the daemon thread, and exactness settings."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from graphft import registry
from graphft.errors import GraphftError
from graphft.ir import Block, Program
from graphft.ops.context import Context
from graphft.runtime.coordination.connect import is_complete
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.member import Member
from graphft.runtime.etcd import LeaseLost, Session, Store, TransientEtcdError
from graphft.runtime.etcd.lease_keeper import LATE
from graphft.runtime.execute.lowering import Lowered, lower
from graphft.runtime.process.progress import Progress, stacks
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_LEASE_LOST, EXIT_OK
from graphft.runtime.process.structs import prepare_structs
from graphft.runtime.roles.logs import BLOCKS

if TYPE_CHECKING:
    from graphft.transpiler import Job

log = logging.getLogger("graphft")

WAIT_NOTICE_SECONDS = 5.0
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.1, 1.0
REPORT_SECONDS = 0.4
T = TypeVar("T")


class Role(Member):
    """One process of a job. Subclasses give the ports of their context and run their blocks.

    `wake` is called (from any thread) when the view changed.
    """

    kind = ""

    def __init__(
        self, job: Job, job_dir: Path, program: Program, etcd: Store, index: int, session: Session | None = None
    ) -> None:
        prepare_structs()  # before the first thread of this role
        self.program, self.job_dir = program, Path(job_dir)
        keep = program.find_op("etcd_keep_alive")
        self.leased = keep is not None
        """Whether this process has a lease, which what it claims hangs on: its program keeps one alive."""
        # Marked by the main thread; the daemon thread ends a process that does not get on.
        progress = Progress(registry.attr(keep, "progress_timeout") if keep is not None else math.inf)
        super().__init__(self.kind, index, etcd, job, progress, session)
        self.seen = JobView()
        """The view as op `etcd_state_watch` took it in last: what the main thread acts on."""
        self.ctx = Context(device=self.config.device, session=self, members=self)
        self._lowered: dict[tuple[str, int], Lowered] = {}
        self._stop_daemon = threading.Event()
        self._report_at = 0.0
        self._kept = 0
        """How many renewals by the lease's keeper were told."""
        self._daemon: threading.Thread | None = None

    # -- blocks -------------------------------------------------------------------------------------------------

    def lowered(self, block: Block, fetch: tuple[str, ...] = (), start: int = 0) -> Lowered:
        key = (block.name, start)
        if key not in self._lowered:
            self._lowered[key] = lower(block, fetch=fetch, start=start, device=self.config.device)
        return self._lowered[key]

    def run_block(self, name: str, fetch: tuple[str, ...] = ()) -> tuple[Any, ...]:
        """Runs a block of the program once, if it has it."""
        if name not in self.program.blocks:
            return ()
        self.progress.beat()
        began = time.perf_counter()
        results = self.lowered(self.program.blocks[name], fetch)(self.ctx, self.ctx.scope)
        if log.isEnabledFor(BLOCKS):
            log.log(BLOCKS, "block %s took %.2f ms", name, 1000 * (time.perf_counter() - began))
        return results

    @property
    def at_step(self) -> int | None:
        """The step (a shard: the version) that this process is at, for its log lines; None before it has begun."""
        return None

    # -- the lease ----------------------------------------------------------------------------------------------

    def open_session(self) -> None:
        """Gets this process's lease, if it needs one: as the last thing before it renews it and makes its claims.

        What takes long and needs no claim (opening the data) comes before: a lease does not wait for it.
        """
        if self.session is None and self.leased:
            self.session = Session(self.etcd, self.config.lease_ttl)
        if self.session is not None:
            self.progress.share(self.session.page)

    # -- the daemon block ---------------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        if self.session is not None:
            self.session.keep(self.etcd.urls)
        if "daemon" in self.program.blocks:
            self._daemon = threading.Thread(target=self._run_daemon, name="daemon block", daemon=True)
            self._daemon.start()

    def _run_daemon(self) -> None:
        block = self.program.blocks["daemon"]
        run = self.lowered(block)
        while not self._stop_daemon.is_set():
            try:
                run(self.ctx, self.ctx.scope)
            except LeaseLost as error:
                self._fence(error)
            except TransientEtcdError as error:
                log.warning("etcd: %s", error.message)  # the lease's own deadline decides how long this may last
            except BaseException:
                log.exception("the daemon block failed; a process without it must not go on")
                self._end_now(EXIT_FAILED)
            self.changed.wait(min(float(block.attrs["interval"]), self.progress.left()))
            self.changed.clear()

    def _end_hung(self) -> None:
        """Ends the process, whose main thread is stuck; its launcher starts it again.

        Others could not go on: this thread would renew the lease, and with it the claims, for ever.
        """
        if self._stop_daemon.is_set():
            return
        what = f"no progress for {self.progress.limit:.0f} s while {self.progress.doing}"
        log.error(
            "%s: ending this process. If a batch may take so long, raise chunk_timeout, which is %g s. It is here:\n%s",
            what,
            self.config.chunk_timeout,
            stacks(self.progress.thread),
        )
        try:
            self.report_hung(what)
        except GraphftError as error:
            log.warning("%s", error.message)
        self._end_now(EXIT_OK if is_complete(self.job_dir) else EXIT_FAILED)

    def report_hung(self, what: str) -> None:
        """Tells others of it, on the daemon thread, before the process ends. `what`: for how long, and while what."""
        self.events.emit(
            "hung", f"{self.kind} {self.index} made {what}: ending it", where=stacks(self.progress.thread, depth=6)
        )

    def _fence(self, error: LeaseLost) -> None:
        """Ends the process at once: whatever it claims may be somebody else's by now, or the job's etcd has ended."""
        if not self._stop_daemon.is_set():
            log.error("lease lost: %s", error.message)
            self._end_now(EXIT_OK if is_complete(self.job_dir) else EXIT_LEASE_LOST)

    def _end_now(self, status: int) -> None:
        self.before_end()
        logging.shutdown()
        os._exit(status)

    def before_end(self) -> None:
        """This process ends itself, and has said why: no batch that it was at is to blame."""

    def fence_if_lost(self) -> None:
        """For main loops: the daemon thread, which looks as well, may be what hangs."""
        try:
            self.check_lease()
        except LeaseLost as error:
            self._fence(error)

    # -- SessionPort --------------------------------------------------------------------------------------------

    def keep_alive(self, progress_timeout: float) -> None:
        """Renews the lease when it is time to, and sees to it that its keeper does when this thread cannot.

        Ends the process if its main thread hangs.
        """
        self.progress.usual = progress_timeout
        if self.progress.hung():
            self._end_hung()
        if self.session is not None:
            self.session.tick()
            self.session.keep(self.etcd.urls)
            self.check_registered()
            self._tell_kept(int(self.session.page.kept))

    def _tell_kept(self, renewals: int) -> None:
        """Says that the daemon thread could not renew for a while: something held the interpreter's lock."""
        if renewals > self._kept:
            log.info(
                "this process could not renew its lease for %.0f s or longer; its keeper did",
                (renewals - self._kept) * LATE * self.config.lease_ttl,
            )
        self._kept = renewals

    def report_status(self, last: bool = False) -> None:
        """Writes what this process does, some times a second: the daemon also wakes for whatever changes in etcd."""
        now = time.monotonic()
        if now < self._report_at and not (last or self.view.over):
            return
        self._report_at = now + REPORT_SECONDS
        key = self.keys.status_of(self.kind, str(self.index) if self.kind == "pserver" else self.id)
        value = msgspec.json.encode(self.status())
        self.etcd.put(key, value, self.lease, deadline=1.0)

    def story(self) -> list[str]:
        """What this role's state machine was told of late, oldest first; nothing if it has none."""
        return []

    def status(self) -> msgspec.Struct:
        raise NotImplementedError

    def watch(self) -> None:
        """Takes in the view, for the main thread to act on. Called on the daemon thread."""
        self.seen = self.view
        self.wake()

    def claim_slots(self, slots: int, policy: str) -> None:
        raise NotImplementedError

    def release_slots(self) -> None:
        raise NotImplementedError

    # -- ending -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._stop_daemon.set()
        self.changed.set()
        if self._daemon is not None:
            self._daemon.join()
        super().close()
