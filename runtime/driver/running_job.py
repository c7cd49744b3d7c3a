"""A launch in a thread of its own: the job's processes are looked after while the script does something else."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.connect import connect
from graphft.runtime.coordination.epoch_metrics import recorded_epoch
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event, PassMetrics
from graphft.runtime.coordination.stale_run import forget_dead, forget_own_etcd, make_way
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.coordination.storage_fence import take_storage
from graphft.runtime.engines.base import Listed
from graphft.runtime.etcd import EtcdError
from graphft.runtime.launcher.child import Child
from graphft.runtime.launcher.launch import launch_run
from graphft.runtime.launcher.options import LaunchOptions
from graphft.runtime.launcher.run_folder import RunFolder
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.launcher.tell import tell
from graphft.runtime.process.folder_lock import holder_of, locked

if TYPE_CHECKING:
    from graphft.transpiler import Job


LOOK_SECONDS, ETCD_SECONDS = 0.1, 2.0
POLL_SECONDS = 0.01
LOAD_LOCK = "load.lock"
"""In the run's folder: held while a state is put in place."""


class _Ended(Exception):
    """The script wants no processes any more."""


class _Launcher(threading.Thread):
    """The thread of a job's launch. A notebook's cell that is run again makes another Trainer of the same run, and the
    one before is out of reach: it would hold the folder for as long as the kernel lives. It is found by its thread."""

    def __init__(self, job: RunningJob) -> None:
        super().__init__(target=job.launch, name="launcher", daemon=True)
        self.job = job


def take_over(path: Path, alone: bool) -> bool:
    """A run's folder, from whatever else holds it; `alone`: one launcher at a time may. Waits in the script's own
    thread, where Ctrl-C ends that. Returns whether it waited for another process."""
    for thread in threading.enumerate():
        if isinstance(thread, _Launcher) and thread.job.folder.path.resolve() == path.resolve():
            tell(f"another Trainer of this process is at work in {path}: its processes are ended")
            thread.job.give_way()
    told = ""
    while alone and path.exists() and (holder := holder_of(path)) != "":
        if holder != told:
            tell(f"{path} is being run by {holder}; waiting for its end")
        told = holder
        time.sleep(LOOK_SECONDS)
    return bool(told)


@contextlib.contextmanager
def at_rest(job: Job, path: Path, endpoints: str) -> Iterator[Callable[[], None]]:
    """Holds a run of which no process works, and waits for one that does. `endpoints`: of an etcd that is not the run's
    own, where others may begin it; "" if it is.

    Yields what has etcd forget the run, which goes on from the newest checkpoint then. That raises
    GraphftError[foreign-job], and forgets nothing, if a process is there, or another unfinished run of this name.
    """
    with contextlib.ExitStack() as stack:
        # Launchers with an etcd that is not the run's own share its folder: loads would write the same files.
        stack.enter_context(locked(path, _tell_of_another_load, file=LOAD_LOCK))
        if not endpoints:
            take_over(path, True)
            stack.enter_context(locked(path))
            take_storage(path)
        yield functools.partial(_forget, job, path, endpoints)


def _tell_of_another_load(holder: str) -> None:
    tell(f"{holder} loads a state into the run; waiting for its end")


def _forget(job: Job, path: Path, endpoints: str) -> None:
    if not endpoints:
        forget_own_etcd(path)
        return
    with connect(endpoints) as etcd:
        keys = Keys(job.config.name)
        make_way(etcd, keys, job)  # of another run that may go on nothing is deleted
        if etcd.get(keys.spec) is not None:
            forget_dead(etcd, keys)


def shut_down() -> UsageError:
    return UsageError(
        "the Trainer was shut down while it trained, by a callback or another thread",
        rule="stopped",
        help="shut it down when train() has returned, or raise an exception in the callback",
    )


class RunningJob:
    """Runs from its start to `stop`, or to whatever ends it before. `passes`: how many may begin at first."""

    def __init__(self, job: Job, folder: RunFolder, options: LaunchOptions, passes: int) -> None:
        self.job, self.folder, self.options = job, folder, options
        self.supervisor: Supervisor | None = None
        self.status: JobStatus | None = None
        """The last one that was seen."""
        self.error: BaseException | None = None
        """What ended it."""
        self._events: Sequence[Event] = ()
        self._asked, self._over = False, threading.Event()
        self._wanted = passes
        self._known = -1
        """The generation as this launch began; -1 until what etcd knows is held against the folder."""
        self._thread = _Launcher(self)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, say, when the thread has begun: nobody is there to end what it starts
            self._asked = True
            raise

    def give_way(self) -> None:
        """Ends it for another one of the same run. Who waits for this one gets an error."""
        self.error = UsageError(
            f"another Trainer of this process has taken over {self.folder.path}",
            rule="job-running",
            help="use one Trainer for a run; train() of this one takes it back",
        )
        self.stop()

    def launch(self) -> None:
        """What its thread does."""
        try:
            passes = self._wanted
            launch_run(self.job, self.folder, self.options, self._look, wanted_passes=passes, driver=self._end_if_asked)
        except _Ended:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._over.set()

    def _look(self, supervisor: Supervisor, status: JobStatus) -> None:
        self.supervisor, self.status, self._events = supervisor, status, status.events
        supervisor.replaces_left = True
        self._ask()
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self._asked:
            raise _Ended

    @property
    def alive(self) -> bool:
        return not self._over.is_set()  # a join that Ctrl-C interrupts makes Python take a thread for ended (3.11)

    def check(self) -> None:
        """Raises what has ended the job, if something has."""
        if self.alive:
            return
        if self.error is not None:
            raise self.error
        if self._asked:
            raise shut_down()
        raise GraphftError(
            f"{self.folder.path} was completed by another launcher, without its Trainer",
            rule="job-complete",
            help="its model is in the folder; another name= begins a new run",
        )

    def reached(self, step: int, saved: bool) -> bool:
        """Whether this step is reached; `saved`: and in a checkpoint that is committed."""
        if self._known < 0 and not self._look_back():
            return False
        status = self.status
        if not saved and status is not None and status.generation >= self._known and status.step >= step:
            return True
        view = self.view()
        return view is not None and view.committed is not None and view.committed.step >= step

    def _look_back(self) -> bool:
        """Whether what etcd knows of an earlier launch is true: its checkpoint may have gone since, or is damaged. Then
        the pservers go back to an older one, and say so."""
        view = self.view()
        if view is None:
            return False
        if view.committed is not None:
            try:
                checkpoints_of(self.folder.path).read_manifest(view.committed.checkpoint)
            except GraphftError:
                return False
        self._known = view.generation.number if view.generation is not None else 0
        return True

    def want(self, passes: int) -> None:
        """Passes before this one may begin."""
        self._wanted = max(self._wanted, passes)
        self._ask()

    def _ask(self) -> None:
        """For the passes that are wanted: by the script, or by the launch, if that had not come so far."""
        passes = self.supervisor.passes if self.supervisor is not None else None
        if passes is not None and passes.count < self._wanted:
            with contextlib.suppress(EtcdError):  # the launch tries again
                passes.want(self._wanted)

    def view(self) -> JobView | None:
        """The job's control records now; None while etcd does not tell them."""
        try:
            return self.supervisor.view if self.supervisor is not None else None
        except EtcdError:
            return None

    def pass_metrics(self, index: int) -> PassMetrics | None:
        """What a pass came to that is over; None while etcd does not tell."""
        if self.supervisor is None:
            return None
        return recorded_epoch(self.supervisor.etcd, Keys(self.job.config.name), index)

    def events(self) -> Sequence[Event]:
        """What etcd keeps of them, up to now; as it was seen last when etcd does not tell."""
        if self.alive and self.supervisor is not None:
            with contextlib.suppress(EtcdError):
                found = read_events(self.supervisor.etcd, Keys(self.job.config.name), deadline=ETCD_SECONDS)
                self._events = [event for _, event in found]
        return self._events

    @property
    def children(self) -> Sequence[Child]:
        return list(self.supervisor.children.values()) if self.supervisor is not None else []

    def listed(self) -> Sequence[Listed]:
        return self.supervisor.engine.list() if self.supervisor is not None else []

    def logs_of(self, child: Child, lines: int) -> Sequence[str]:
        """The last lines that the role's processes wrote; none if they are out of reach."""
        with contextlib.suppress(OSError, GraphftError):
            assert self.supervisor is not None
            return self.supervisor.last_lines(child, lines)
        return ()

    def tail_of(self, child: Child) -> str:
        return "\n".join(self.logs_of(child, 15))

    def stop(self) -> None:
        """Ends its processes in order, and etcd if that is the job's own. The job can be gone on with. Interrupted, it
        may be called again."""
        self._asked = True
        while self.alive or self._thread.is_alive():  # an Event's wait that a signal ends may leave its lock taken
            time.sleep(POLL_SECONDS)
