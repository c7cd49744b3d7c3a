"""`graphft.Trainer`: training epoch by epoch, on whatever engine, whatever dies.

After RaySGD's fault tolerance (`trainer.train(max_retries=N, checkpoint="auto")`). A lost worker needs no checkpoint
here: the others take over its work, and the bits are those of an undisturbed run. The driver, the process that has the
Trainer, may die, too: the same script finds the run by its name and storage, and goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from graphft.errors import GraphftError, UsageError, shown_plainly, without_traceback
from graphft.ir import Program
from graphft.runtime.callbacks.callbacks import Callbacks
from graphft.runtime.callbacks.runner import CallbackRunner
from graphft.runtime.coordination.job_files import url_of
from graphft.runtime.coordination.records import Event, Ordered
from graphft.runtime.coordination.result_files import note_validation
from graphft.runtime.driver.options import BEYOND, check_call, check_driver, check_number, check_place, make_job
from graphft.runtime.driver.running_job import (
    NewestCheckpoint,
    RunningJob,
    WorkerFailed,
    as_dict,
    missed_epoch,
    parts_of,
    shut_down,
)
from graphft.runtime.executor import validate_here
from graphft.runtime.interchange.training_state import JobState
from graphft.runtime.launcher.ending import interruptible, tell
from graphft.runtime.launcher.launch import prepare
from graphft.runtime.launcher.process_ends import note
from graphft.runtime.launcher.run_folder import RunFolder
from graphft.runtime.loop.check_points import save_check_point
from graphft.runtime.loop.snapshot import TrainStatus
from graphft.runtime.process.role_process import ROLES, hear_of_children
from graphft.transpiler.evaluation import check_fits, evaluation_of
from graphft.transpiler.job import Job
from graphft.transpiler.validation import EPOCH, Validation, ValidationConfig

LOOK_SECONDS, MOST_SECONDS = 0.02, 0.5
SETTLE_SECONDS = 30.0
"""For which `shutdown` waits for a checkpoint."""
FOREVER = 1 << 30
"""Failures of one role in a row that the supervisor bears: `max_retries` counts them here."""


def _pause(begun: float) -> float:
    """Returns for how long to wait before the next look at an epoch that is waited for since then: each asks etcd."""
    return min(max((time.monotonic() - begun) / 20, LOOK_SECONDS), MOST_SECONDS)


class Trainer:
    """Trains a program epoch by epoch.

        with graphft.Trainer(program, num_workers=2, name="cancer", data=data, batch_size=16) as trainer:
            while trainer.epoch < 20:
                print(trainer.train(max_retries=3))
            trainer.save("cancer-checkpoints")

    Args:
        program: What `graphft.build` and `minimize` made; or a job of `graphft.transpile`, sync and with ft=True.
        num_workers: Logical trainers (slots). As many processes are started; the job goes on with fewer.
        name: The job's, and of its folder `jobs/<name>`: by it a script that is run again finds its run.
        engine: Where the processes run: a name ("local", "ray", "slurm", ...) or an engine's options.
        resources: By role, what a process takes: {"trainer": {"CPU": 2, "GPU": 1}}.
        callbacks: See `graphft.runtime.callbacks.callbacks.Callbacks`.
        validation: A `graphft.Validation`, for `validate`.
        max_retries: Of each `train` that does not say.
        max_epochs: More can not be trained.
        quiet, page, job_dir: As of `job.run`.
        options: Those of `graphft.transpile`: data, batch_size, pservers, storage, seed, ...

    Raises GraphftError for what makes no sense, before anything is started.
    """

    @shown_plainly
    def __init__(
        self,
        program: Program | Job,
        *,
        engine: str | Any = "",
        resources: Mapping[str, Mapping[str, float]] | None = None,
        callbacks: Sequence[Any] | None = None,
        validation: Validation | None = None,
        max_retries: int = 3,
        quiet: bool = False,
        page: bool | int | None = None,
        job_dir: str = "",
        **options: Any,
    ) -> None:
        hear_of_children()
        check_driver(engine)
        check_number("max_retries", max_retries, -1)
        told, self._max_retries = Callbacks(callbacks), max_retries
        job = make_job(program, options)
        self._program = job.source
        self._evaluation = self._evaluation_of(validation) if validation is not None else None
        given = {"engine": engine, "resources": resources, "quiet": quiet, "job_dir": job_dir}
        given = {name: value or None for name, value in given.items()}
        self.job, self._folder, self._options = prepare(job, page=page, max_restarts=FOREVER, **given)
        if self._folder.before:  # another run than the newest: also where nothing is left to train
            tell(self._folder.describe(self.job.config))
            self._folder = RunFolder(self._folder.path)
        self._callbacks = CallbackRunner(told, self.job, self._folder.path, tell)
        self._running: RunningJob | None = None
        self._past: Sequence[Event] = ()
        self._trained = 0  # epochs that `train` has returned; the checkpoint of the last one may be on its way
        self._newest = NewestCheckpoint(self.job, self.job_dir)
        self._counted_from = 0.0
        self._failed = False  # once an error has ended a call, or its `with`
        self._busy, self._pid = threading.Lock(), os.getpid()
        atexit.register(self._at_exit)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._failed = self._failed or error is not None
        self.shutdown()

    @property
    def job_dir(self) -> Path:
        """The run's folder: logs, metrics, checkpoints (without a storage)."""
        return self._folder.path

    @property
    def storage(self) -> str:
        """The URL of the run's storage, else the path of its folder. What a script keeps for the next one belongs
        there: `f"{trainer.storage}/best"`."""
        return url_of(self.job_dir) or str(self.job_dir)

    @property
    def epoch(self) -> int:
        """Epochs that are done, in earlier processes, too. Raises GraphftError if the newest checkpoint is gone, or
        cannot be read now."""
        alive = self._running is not None and self._running.alive
        return max(self.job.config.plan.pass_of(self._newest.step(self._running)), self._trained if alive else 0)

    @property
    def at_epoch_end(self) -> bool:
        """True if the newest checkpoint is the end of an epoch: one that a script which died may not have looked at."""
        return self.epoch > 0 and self._newest.step(self._running) == self._end_of(self.epoch)

    def train(
        self, *, max_retries: int | None = None, checkpoint: Literal["auto"] | int | None = "auto", epochs: int = 1
    ) -> dict[str, float]:
        """Trains one epoch (or `epochs`, without a pause between them but for callbacks' `on_epoch`) more, and returns
        the metrics of the last one: `epoch` (how many are done), `loss` and what `loss_fn` returned beside it (means
        over samples), `samples`, `discarded`, `steps`, `seconds`; `failures` and `preemptions` since the call before.
        Callbacks are told of each. The end of another process that trains the run is waited for.

        Args:
            max_retries: Failures of workers that this call bears (3; -1: any number). What is killed from outside, by
                preemption or by scaling, is no failure.
            checkpoint: "auto": returns when the epoch's checkpoint is committed, so that each epoch begins from one.
                None: returns when its last step is applied; the checkpoint follows beside, and what looks at the state
                (`validate`, `state_dict`, `save`, `shutdown`) waits for it. A number n: "auto" for each n-th epoch,
                None for the others.

        Raises:
            WorkerFailed: [retries] when that is exceeded, with the worker's own traceback. Another call goes on from
                the newest checkpoint.
            GraphftError: what else has ended the job. Interrupted, a KeyboardInterrupt, on Ctrl-C and SIGTERM.
        """
        most = self._max_retries if max_retries is None else max_retries
        check_call(most, checkpoint, epochs)
        if not self._busy.acquire(blocking=False):  # two would count the same epochs
            raise UsageError(
                "train() was called while it is at work",
                rule="busy",
                help="call it when it has returned; workers(), events() and signal() may be called at any time",
            )
        try:
            return self._train_epochs(most, checkpoint, epochs)
        finally:
            self._busy.release()

    def _train_epochs(self, most: int, checkpoint: Any, epochs: int) -> dict[str, float]:
        done = self.epoch
        target, limit = done + epochs, self.job.config.epochs - BEYOND
        if target > limit:
            raise UsageError(
                f"epoch {target} is beyond the last one: {done} of {limit} are done",
                rule="max-epochs",
                help="give the Trainer more max_epochs from the beginning",
            )
        epoch, words = done + 1, "interrupted in epoch {}; run again to go on with {}"
        with interruptible(lambda: words.format(epoch, self.job_dir)), self._ended_by_errors(), self._callbacks:
            self._tell_missed(done, start=True)
            one_by_one = self._callbacks.callbacks.hears("on_epoch")  # which is to find the epoch's state
            self._want(epoch if one_by_one else target)
            for epoch in range(done + 1, target):
                self._train_one(epoch, False, most)
                if one_by_one and self._running is not None:
                    self._running.want(epoch + 1)
            epoch, saved = target, checkpoint is not None and (checkpoint == "auto" or target % checkpoint == 0)
            metrics = self._train_one(epoch, saved, most)
            if self._running is not None:
                self._running.settle()
        return metrics

    def _train_one(self, epoch: int, saved: bool, most: int) -> dict[str, float]:
        begun, first = self._counted_from, self._end_of(epoch - 1)
        running = self._await(epoch, saved, most)
        self._callbacks.steps_until(self._end_of(epoch))
        self._trained, self._counted_from = epoch, time.monotonic()
        metrics: dict[str, float] = {"epoch": epoch, **running.epoch_metrics(epoch)}
        metrics |= {"steps": self._end_of(epoch) - first, "seconds": self._counted_from - begun}
        metrics |= {"failures": running.failures, "preemptions": running.preemptions}
        self._callbacks.epoch(epoch, metrics)
        return metrics

    def _tell_missed(self, done: int, start: bool = False) -> None:
        """Tells of the epochs that were done while no script was there to hear of it. `start`: the job may be started
        for it."""
        if not self._callbacks.missed(done):
            return
        if start:
            self._want(done)
        self._callbacks.catch_up(done, lambda epoch: missed_epoch(self.job, self.job_dir, epoch, self._running))

    def validate(self, validation: Validation | None = None) -> dict[str, float]:
        """Returns means of the loss and the metrics over data that is not trained on, with the weights of the newest
        checkpoint. Computed in this process. Raises UsageError without a `Validation`."""
        own = self._evaluation if validation is None else None
        evaluation, config = own or self._evaluation_of(validation)
        with interruptible(lambda: f"interrupted while it validates; run again to go on with {self.job_dir}"):
            state = self.state_dict()
            metrics = validate_here(evaluation, config, state["model"], self.job.config.device)
            note_validation(self.job_dir, state["epoch"], state["step"], metrics)
        with self._ended_by_errors(), self._callbacks:
            self._tell_missed(self.epoch)
            self._callbacks.validation(state["epoch"], metrics)
        return metrics

    def _evaluation_of(self, validation: Validation | None) -> tuple[Program, ValidationConfig]:
        """Raises GraphftError if it does not fit the program that is trained."""
        if not isinstance(validation, Validation):
            raise UsageError(
                f"there is no graphft.Validation to validate with, but {validation!r:.40}",
                rule="option",
                help="Trainer(..., validation=graphft.Validation(data=graphft.arrays(x=x, y=y, chunk_size=256)))",
            )
        config = validation.config()
        if validation.every != EPOCH or config.criteria:
            given = f"every is {validation.every}" if validation.every != EPOCH else f"{config.criteria[0]} is given"
            raise UsageError(
                f"{given}, and a Trainer validates when validate() is called",
                rule="option",
                help="leave it out; graphft.transpile(validate=) validates while it trains",
            )
        assert validation.data is not None
        made = evaluation_of(self._program, validation)
        check_fits(self._program, made, validation.data)
        return made, config

    def state_dict(self) -> dict[str, Any]:
        """Returns `epoch`, `step`, `model` (its state_dict) and `optimizer` (by parameter, as torch.optim names its
        state), of the newest checkpoint. Before the first epoch: the initial weights."""
        return as_dict(self._state(), self.job)

    def _state(self) -> JobState | None:
        self._settle()
        return self._newest.state(self._running)

    def save(
        self, path: str | os.PathLike[str], *, keep: int = 3, metrics: Mapping[str, float] | None = None
    ) -> int | None:
        """Saves `state_dict()` as a new version in a folder or below a URL, as `graphft.save_check_point` does. Returns
        the version. `read_weights` and `init_from=` take the path, too. `keep`: so many of the newest. `metrics`:
        numbers that are saved beside it."""
        check_place(path, self.job_dir, self.storage)
        found = self._state()
        state = as_dict(found, self.job)
        status = TrainStatus(state["epoch"] - 1, state["step"], metrics=dict(metrics or {}))
        return save_check_point(parts_of(state, found), status, path, keep=keep)

    def shutdown(self) -> None:
        """Ends all processes, in order; the run can be gone on with. `with` does it, and the end of the script. Waits
        half a minute for the checkpoint of the last epoch."""
        if self._running is not None:
            with interruptible(lambda: f"interrupted; run again to go on with {self.job_dir}"):
                self._settle(SETTLE_SECONDS)
                self._stop()
            self._callbacks.end()
        elif self._callbacks.callbacks and not (self._failed or self._callbacks.begun):
            with self._callbacks:  # all epochs were done: they hear what a script that died did not tell
                self._tell_missed(self.epoch)
            self._callbacks.end()

    # -- to look, and to disturb ------------------------------------------------------------------------------------

    def workers(self) -> Sequence[Ordered]:
        """Returns the job's processes, as the engine lists them."""
        return self._running.listed() if self._running is not None else ()

    def events(self) -> Sequence[Event]:
        """Returns what happened of late: `at`, `who`, `kind`, `text`, `fields`."""
        return self._running.events() if self._running is not None else self._past

    def signal(self, role: str, index: int, signum: int) -> bool:
        """Sends a signal to a process of this role and index: SIGKILL, to see that nothing is lost. Returns False if
        there is none now."""
        if role not in ROLES or signum not in signal.valid_signals():
            raise UsageError(
                f"there is no role {role!r}, or no signal {signum!r}",
                rule="option",
                help=f'roles are {", ".join(ROLES)}: trainer.signal("trainer", 0, signal.SIGKILL)',
            )
        supervisor = self._running.supervisor if self._running is not None else None
        return supervisor is not None and supervisor.signal(role, index, signum)

    # -- inside -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """Whatever is raised in it ends the processes, for nobody may be left to do so."""
        try:
            yield
        except BaseException as error:
            self._failed = True
            self._stop()
            if isinstance(error, WorkerFailed):  # what ends a job itself is noted by its launch
                note(self.job_dir, "failed", error.message.splitlines()[0])
            if isinstance(error, GraphftError):
                without_traceback(error)
            raise

    def _at_exit(self) -> None:
        """A second Ctrl-C while it waits ends it: the processes end with this one. A forked child has none."""
        if os.getpid() == self._pid:
            with contextlib.suppress(KeyboardInterrupt):
                self.shutdown()

    def _want(self, target: int) -> None:
        self._counted_from, running = time.monotonic(), self._running
        if running is None or not running.alive:
            self._trained = 0
            self._running = RunningJob(self.job, self._folder, self._options, target)
        else:
            running.want(target)

    def _await(self, epoch: int, saved: bool, most: int) -> RunningJob:
        running, begun = self._running, time.monotonic()
        if running is None:
            raise shut_down()
        while not running.reached(self._end_of(epoch), saved):
            running.check()
            running.check_failures(most)
            self._look_at(running)
            time.sleep(_pause(begun))
        self._look_at(running)
        self._callbacks.hear(running.events())
        return running

    def _look_at(self, running: RunningJob) -> None:
        if running.status is not None:
            self._callbacks.look(running.status)

    def _end_of(self, epochs: int) -> int:
        return self.job.config.plan.start_steps[epochs]

    def _settle(self, seconds: float = math.inf) -> None:
        """Waits for the checkpoint of the last epoch that `train` returned."""
        running, begun = self._running, time.monotonic()
        if running is None or not self._trained:
            return
        while running.alive and not running.reached(self._end_of(self._trained), True):
            if time.monotonic() > begun + seconds:
                tell(f"epoch {self._trained} has no checkpoint so far: the run goes on from the newest one")
                return
            time.sleep(_pause(begun))

    def _stop(self) -> None:
        with contextlib.suppress(GraphftError):
            self._newest.step(self._running)
        running = self._running  # another thread's shutdown() may forget it meanwhile
        if running is not None:
            self._past = running.events()
            running.stop()  # interrupted, it is not forgotten
            self._running, self._trained = None, 0
            if self._callbacks.begun:
                with self._callbacks:
                    self._callbacks.hear(self._past)
