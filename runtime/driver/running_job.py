"""Launches a job in a thread of its own: its processes are looked after while the script does something else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphft.errors import GraphftError, UsageError
from graphft.runtime.checkpoint.store import checkpoints_of, read_saved_step
from graphft.runtime.coordination.event_log import read_events
from graphft.runtime.coordination.job_view import JobView
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Event, Ordered, PassMetrics
from graphft.runtime.coordination.result_files import epoch_of_table, recorded_epoch
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.etcd import EtcdError
from graphft.runtime.interchange.training_state import LOOK_SECONDS, LOOKS, JobState, optimizer_of, read_job
from graphft.runtime.launcher.child import Child
from graphft.runtime.launcher.ending import tell
from graphft.runtime.launcher.launch import launch_run
from graphft.runtime.launcher.options import LaunchOptions
from graphft.runtime.launcher.process_ends import discarded_in, note_saved, past_epoch, was_saved
from graphft.runtime.launcher.run_folder import RunFolder
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.transpiler.job import Job
from graphft.transpiler.layout import assemble

ETCD_SECONDS, POLL_SECONDS = 2.0, 0.01
TOLD_SECONDS, START_SECONDS = 10.0, 30.0
"""For how long the first shard's record of an epoch that is over is waited for; and while the job starts."""


class WorkerFailed(GraphftError):
    """More failures than `max_retries`. `traceback`: of the last worker that failed; "" if it told none."""

    def __init__(self, message: str, traceback: str) -> None:
        self.traceback = traceback
        super().__init__(
            message + (f"\n{traceback.rstrip()}" if traceback else ""),
            rule="retries",
            help="mend what it says, and call train() again, or run the script again: it goes on from the newest "
            "checkpoint",
        )


class _Ended(Exception):
    """The script wants no processes any more."""


_launches: dict[Path, RunningJob] = {}
"""The launches of this process, by their folders: a notebook's cell that is run again makes another Trainer of the same
run, and the one before, which holds the folder, is out of reach."""


def _end_other(path: Path) -> None:
    other = _launches.pop(path.resolve(), None)
    if other is not None and other.alive:
        tell(f"another Trainer of this process is at work in {path}: its processes are ended")
        other.error = UsageError(
            f"another Trainer of this process has taken over {path}",
            rule="job-running",
            help="use one Trainer for a run; train() of this one takes it back",
        )
        other.stop()


def shut_down() -> UsageError:
    return UsageError(
        "the Trainer was shut down while it trained, by a callback or another thread",
        rule="stopped",
        help="shut it down when train() has returned, or raise an exception in the callback",
    )


class RunningJob:
    """Runs from its start to `stop`, or to an `error`. `passes`: how many may begin at first. `status`: the last one
    that was seen."""

    def __init__(self, job: Job, folder: RunFolder, options: LaunchOptions, passes: int) -> None:
        self.job, self.folder, self.options = job, folder, options
        self.supervisor: Supervisor | None = None
        self.status: JobStatus | None = None
        self.error: BaseException | None = None
        self._events: Sequence[Event] = ()
        self._asked, self._over = False, threading.Event()
        self._wanted = passes
        self._known = -1  # the generation as this launch began, once what etcd knows is compared with the folder
        self._before = (0, 0)  # failures and preemptions before this call of `train`: workers fail between two, too
        _end_other(folder.path)
        _launches[folder.path.resolve()] = self
        self._thread = threading.Thread(target=self._launch, name="launcher", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, say, when the thread has begun: nobody is there to end what it starts
            self._asked = True
            raise

    def _launch(self) -> None:
        try:
            passes, look = self._wanted, [self._look]
            launch_run(self.job, self.folder, self.options, look, wanted_passes=passes, driver=self._end_if_asked)
        except _Ended:
            pass
        except BaseException as error:
            self.error = self.error or error
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
        """Raises what has ended the job, if something has; with the traceback of the worker that failed last."""
        if self.alive:
            return
        if isinstance(self.error, GraphftError) and self.error.rule == "job-failed" and self.failures:
            raise self._worker_failed(self.error.message) from self.error
        if self.error is not None:
            raise self.error
        if self._asked:
            raise shut_down()
        raise GraphftError(
            f"{self.folder.path} was completed by another launcher, without its Trainer",
            rule="job-complete",
            help="its model is in the folder; another name= begins a new run",
        )

    # -- how far it is ----------------------------------------------------------------------------------------------

    def reached(self, step: int, saved: bool) -> bool:
        """True once this step is reached; `saved`: and in a checkpoint that is committed."""
        if self._known < 0 and not self._look_back():
            return False
        status = self.status
        if not saved and status is not None and status.generation >= self._known and status.step >= step:
            return True
        view = self.view()
        return view is not None and view.committed is not None and view.committed.step >= step

    def _look_back(self) -> bool:
        """True if what etcd knows of an earlier launch still holds: its checkpoint may be gone since, or damaged."""
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
        self._wanted = max(self._wanted, passes)
        self._ask()

    def _ask(self) -> None:
        passes = self.supervisor.passes if self.supervisor is not None else None
        if passes is not None and passes.count < self._wanted:
            with contextlib.suppress(EtcdError):  # the launch tries again
                passes.want(self._wanted)

    def view(self) -> JobView | None:
        try:
            return self.supervisor.view if self.supervisor is not None else None
        except EtcdError:
            return None

    def events(self) -> Sequence[Event]:
        """Returns those that etcd keeps; as they were seen last when it does not answer."""
        if self.alive and self.supervisor is not None:
            with contextlib.suppress(EtcdError):
                found = read_events(self.supervisor.etcd, Keys(self.job.config.name), deadline=ETCD_SECONDS)
                self._events = [event for _, event in found]
        return self._events

    def listed(self) -> Sequence[Ordered]:
        return self.supervisor.engine.list() if self.supervisor is not None else []

    # -- workers that failed ----------------------------------------------------------------------------------------

    @property
    def _children(self) -> Sequence[Child]:
        return list(self.supervisor.children.values()) if self.supervisor is not None else []

    @property
    def failures(self) -> int:
        return sum(child.failures for child in self._children) - self._before[0]

    @property
    def preemptions(self) -> int:
        return sum(child.preemptions for child in self._children) - self._before[1]

    def settle(self) -> None:
        self._before = (self._before[0] + self.failures, self._before[1] + self.preemptions)

    def check_failures(self, most: int) -> None:
        """Raises WorkerFailed if they are more than `most`; -1: any number."""
        if 0 <= most < self.failures:
            times = f"workers have failed {self.failures} times since the call before, and max_retries is {most}"
            raise self._worker_failed(times)

    def _worker_failed(self, what: str) -> WorkerFailed:
        """Adds the traceback of the worker that failed last, or the end of its log."""
        last = max(self._children, key=lambda child: child.died_at)
        what = f"{last.death}; {what}"
        began = time.time() - (time.monotonic() - last.died_started)
        events = [e for e in self.events() if e.who == last.name and e.at >= began]
        if told := [e.fields["traceback"] for e in events if e.fields.get("traceback")]:
            return WorkerFailed(what, str(told[-1]))
        assert self.supervisor is not None
        tail = "" if "last lines of" in what else self.supervisor.tail_of_log(last)
        return WorkerFailed("\n".join(filter(None, (what, tail))), "")

    # -- epochs -----------------------------------------------------------------------------------------------------

    def epoch_metrics(self, epoch: int) -> dict[str, float]:
        """Returns means of the loss and each metric over the samples of an epoch (from 1), how many `samples` these
        are, and how many of its records were `discarded`."""
        found = self._recorded(epoch, TOLD_SECONDS)
        if found is None:
            self.check()
            what = f"epoch {epoch} is done, and etcd does not tell its metrics"
            raise GraphftError(what, rule="etcd-unreachable", help="call train() again: it goes on with the next epoch")
        if count := discarded_in(self.job.config, epoch, found):
            tell(f"epoch {epoch} DISCARDED {count} records: `graphft status --job {self.folder.path}` tells which")
        return found.numbers() | {"discarded": count}

    def _recorded(self, epoch: int, seconds: float) -> PassMetrics | None:
        end, keys = time.monotonic() + seconds, Keys(self.job.config.name)
        while True:
            found = recorded_epoch(self.supervisor.etcd, keys, epoch - 1) if self.supervisor is not None else None
            if found is not None or time.monotonic() > end or not self.alive:
                return found
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Ends its processes in order, and etcd if that is the job's own. Interrupted, it may be called again."""
        self._asked = True
        while self.alive or self._thread.is_alive():  # an Event's wait that a signal ends may leave its lock taken
            time.sleep(POLL_SECONDS)
        if _launches.get(self.folder.path.resolve()) is self:
            del _launches[self.folder.path.resolve()]


def missed_epoch(job: Job, job_dir: Path, epoch: int, running: RunningJob | None) -> dict[str, float]:
    """Returns the metrics of an epoch (from 1) that was done while no script looked: as the table here has it, or as
    etcd tells."""
    found = epoch_of_table(job_dir, job.config, epoch - 1)
    if found.lacking and running is not None:
        found = running._recorded(epoch, START_SECONDS) or found
    return past_epoch(job.config, job_dir, epoch, found)


# -- its state --------------------------------------------------------------------------------------------------------


class NewestCheckpoint:
    """Finds the newest committed checkpoint of a run. One that was seen and is gone is an error."""

    def __init__(self, job: Job, job_dir: Path) -> None:
        self.job, self.job_dir = job, job_dir
        self._seen = 0

    def step(self, running: RunningJob | None) -> int:
        """Returns its step; 0 before the first: as etcd tells while processes are `running`, else as the folder holds.
        Raises GraphftError if it held a newer one before, which an earlier script may have seen; StorageUnavailable."""
        view = running.view() if running is not None and running.alive else None
        if view is not None and view.committed is not None:
            found = view.committed.step
        else:
            for _ in range(LOOKS):  # another process may train the run, and have replaced what was looked at just now
                found = read_saved_step(self.job_dir, self.job.config)
                if found >= self._seen and (found or not was_saved(self.job_dir)):
                    break
                time.sleep(LOOK_SECONDS)
            else:
                before = f"of step {self._seen}" if self._seen else "that was there when it was trained last"
                raise GraphftError(
                    f"the checkpoint {before} is gone, or damaged: {self.job_dir} holds "
                    + (f"one of step {found}" if found else "no whole one"),
                    rule="checkpoint",
                    help="bring it back; or make another Trainer of this run, which goes on from the older one; if all "
                    "are gone, begin a new run: another name=",
                )
        if found and not self._seen:
            note_saved(self.job_dir, found)
        self._seen = found
        return found

    def state(self, running: RunningJob | None) -> JobState | None:
        """Returns None before the first. Raises GraphftError if it is damaged, or as `step`."""
        newest, plan = self.step(running), self.job.config.plan
        if newest == 0:
            return None
        found = read_job(self.job_dir)
        if plan.pass_of(found.step) < plan.pass_of(newest):
            raise GraphftError(
                f"the checkpoint of step {newest}, epoch {plan.pass_of(newest)}, is damaged: the newest that is whole "
                f"is of step {found.step}, epoch {plan.pass_of(found.step)}",
                rule="checkpoint",
                help="train() another epoch, which writes a new one; or shutdown(): another Trainer of this run goes "
                "on from the older one",
            )
        return found


# -- as a dict, and saved ---------------------------------------------------------------------------------------------


class _Part:
    """A state that is there already, as an object that is saved."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = state


def as_dict(found: JobState | None, job: Job) -> dict[str, Any]:
    """Returns what a Trainer's `state_dict` does; None: as the run begins."""
    if found is None:
        shards = [job.pserver_program(i).values for i in range(job.config.pservers)]
        return {"epoch": 0, "step": 0, "model": assemble(job.trainer_program(), shards), "optimizer": {}}
    epoch = job.config.plan.pass_of(found.step)
    return {"epoch": epoch, "step": found.step, "model": found.model, "optimizer": found.optimizer}


def parts_of(state: Mapping[str, Any], found: JobState | None) -> dict[str, _Part]:
    """Returns what `save` writes: model and optimizer as torch has them, and the place in the run."""
    nothing: dict[str, Any] = {"state": {}, "param_groups": []}
    optimizer = nothing if found is None else optimizer_of(found)
    place = {"epoch": state["epoch"], "step": state["step"]}
    return {"model": _Part(state["model"]), "optimizer": _Part(optimizer), "trainer": _Part(place)}
