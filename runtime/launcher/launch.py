"""Runs a job: as one role of it, or with all of its roles, from the start of etcd to the result."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.data import being_imported
from graphft.errors import GraphftError, UsageError, shown_plainly
from graphft.runtime.callbacks.callbacks import NAMES, OF_A_LAUNCH, Callbacks
from graphft.runtime.callbacks.runner import CURSOR
from graphft.runtime.checkpoint.store import saved_step
from graphft.runtime.coordination.connect import WAIT_SECONDS, check_note, connect, write_endpoints
from graphft.runtime.coordination.job_files import (
    MODEL,
    delete_entries,
    fetch_result,
    is_complete,
    publish,
    take_storage,
)
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.result_files import TakenValidations, discarded_of
from graphft.runtime.coordination.revoker import revoke_dead
from graphft.runtime.coordination.run_record import (
    WantedPasses,
    begin_anew,
    check_asked_for,
    fenced,
    make_way,
    put_job,
    start_etcd,
    tell_failed,
    try_again,
)
from graphft.runtime.coordination.runs import link_newest
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.engines.base import Run, engine_options
from graphft.runtime.engines.local import Local
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.launcher.display import Display
from graphft.runtime.launcher.ending import Reached, Warnings, interruptible, tell
from graphft.runtime.launcher.options import CALLED, LaunchOptions, check_counts, choose_options
from graphft.runtime.launcher.page_command import LaunchPage
from graphft.runtime.launcher.process_ends import note
from graphft.runtime.launcher.result import Result, steps_of
from graphft.runtime.launcher.run_folder import RunFolder, open_run, saved_run
from graphft.runtime.launcher.supervise import STATUS_EVERY_SECONDS, CallbackObserver, supervise, why_failed
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.page.time_keeper import TimeKeeper
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.role_process import EXIT_OK, EXIT_USAGE, hear_of_children, role_environment
from graphft.runtime.process.threads import prepare_structs
from graphft.transpiler.record import read_record

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig
    from graphft.transpiler.job import Job
    from graphft.transpiler.record import JobRecord

UNWATCHED_SECONDS = 1.0
"""Between two looks at a job's status where no callback waits for it."""
OnStatus = Callable[[Supervisor, JobStatus], None]


@shown_plainly
def run_job(
    job: Job,
    *,
    options: LaunchOptions | None = None,
    on_status: OnStatus | None = None,
    callbacks: Sequence[Any] | None = None,
    **overrides: Any,
) -> Result:
    """Runs `job` to its end with all roles on this machine, and returns its result. If the newest run of the very job
    is complete, its result is returned at once (`fresh=True` begins another).

    With GRAPHFT_ROLE (or torchrun's RANK) in the environment, this process is that one role instead, and exits with it.
    `overrides` are fields of `LaunchOptions`. `on_status` sees each status, with the supervisor. `callbacks`: see
    `callbacks.Callbacks`. Raises GraphftError if the job fails, Interrupted on Ctrl-C and SIGTERM.
    """
    _begin(job, overrides)
    told = Callbacks(callbacks, NAMES if job.config.validate is not None else OF_A_LAUNCH)
    if told:
        from graphft.capture.loss_fn import check_told, reported  # with torch

        check_told(reported(job.trainer_program()))
    chosen = choose_options(options, overrides)
    job, folder = _open(job, chosen)
    wanted = job.config.epochs if job.config.passes_on_demand else None
    observers = [on_status] if on_status is not None else []
    if not told:
        return launch_run(job, folder, chosen, observers, wanted_passes=wanted)
    with ExitStack() as stack:
        observer = CallbackObserver(told, job, folder.path, stack)
        result = launch_run(job, folder, chosen, [*observers, observer.look], wanted_passes=wanted)
        complete = f"interrupted; {folder.path} is complete, and callbacks were NOT told of all of it"
        with interruptible(lambda: complete):  # the last callbacks may take their time
            observer.finish(result.steps)
    return result


def prepare(job: Job, **overrides: Any) -> tuple[Job, RunFolder, LaunchOptions]:
    """Returns what `launch_run` needs: the job as its folder has it, that, and the options with what the command line
    says. A process that is a role of it ends here."""
    _begin(job, {})
    chosen = choose_options(None, overrides)
    return *_open(job, chosen), chosen


def launch_saved(path: Path, options: LaunchOptions) -> None:
    """Runs the job in a run's folder to its end, without its script. Raises GraphftError if it cannot, or fails."""
    record = read_record(path)
    folder = saved_run(path, fresh=options.fresh)
    if folder.complete:
        fetch_result(path)
        link_newest(path)
        print(f"{path} is complete: {path / MODEL}")
        return
    _check_processes(record, options)
    if not options.endpoints(record.config):
        check_asked_for(record.config, path, "run that script again")
    if (path / CURSOR).exists():
        tell(f"the callbacks of the script that began {path} are NOT called here: run that script, if they are to be")
    launch_run(record, folder, options)


def _begin(job: Job, overrides: Mapping[str, Any]) -> None:
    """Ends with its role, if the environment names one. Raises UsageError when a script runs its job while it is
    imported for a Dataset."""
    os.environ[CALLED] = "1"
    if file := being_imported():
        raise UsageError(
            f"{file} calls job.run() when it is imported, and every trainer imports it: for the Dataset in it",
            rule="main-guard",
            help="put what is to run once below `if __name__ == '__main__':`",
        )
    from graphft.runtime.roles.environment import role_of_environment, run_as_role  # with torch

    try:
        role = role_of_environment(os.environ, job.config.pservers, job.config.dispatch == "coordinator")
        if role is None:
            return
        if overrides.get("fresh"):
            raise UsageError(
                "fresh cannot hold for a role: all roles of a run, and those started again, use one folder",
                rule="option",
                help="leave it out, and set GRAPHFT_JOB_DIR to a new folder for a new run",
            )
        status = run_as_role(job, role)
    except GraphftError as error:
        print(error, file=sys.stderr)
        status = EXIT_USAGE
    sys.exit(status)


def _open(job: Job, chosen: LaunchOptions) -> tuple[Job, RunFolder]:
    from graphft.transpiler.job import Job

    _check_processes(job, chosen)
    with interruptible(lambda: "interrupted before the job was started; run again"):  # large data take a while
        folder = open_run(job, chosen.job_dir, fresh=chosen.fresh)
        exact, job = job.config.exact, Job.load(folder.path)  # a run goes on as it began: its id is the folder's
    if exact != job.config.exact and not folder.complete:
        tell(f"{folder.path} goes on as it began, with exact={job.config.exact}; fresh=True begins another run")
    if chosen.save_only:
        print(f"saved to {folder.path}")
        sys.exit(EXIT_OK)
    return job, folder


def _check_processes(job: Job | JobRecord, options: LaunchOptions) -> None:
    if not options.save_only:
        check_counts(job.config, options.counts(job.config), embedded=not options.endpoints(job.config))


def launch_run(
    job: Job | JobRecord,
    folder: RunFolder,
    options: LaunchOptions,
    observers: Sequence[OnStatus] = (),
    *,
    wanted_passes: int | None = None,
    driver: Callable[[], None] = lambda: None,
) -> Result:
    """Says what is run, starts etcd if needed and all roles of a saved job; returns when it is complete. The end of
    another launcher that runs it is waited for. Raises Interrupted on Ctrl-C and SIGTERM. `wanted_passes`: how many may
    begin, where they are on demand; None: another launch says. What `driver`, which is called all the while, raises
    ends the launch."""
    prepare_structs()
    hear_of_children()
    begun_at, path, config = time.monotonic(), folder.path, job.config
    shared = bool(options.endpoints(config))
    reached = Reached(path, config)
    waited = ""

    def wait(holder: str) -> None:
        nonlocal waited
        tell(f"{path} is being run by {holder}; waiting (--no-wait or wait=False: an error)")
        waited = holder

    def completed(line: str) -> Result:
        fetch_result(path)
        tell(line)
        return _finished(Result.of(path, steps_of(path, config), time.monotonic() - begun_at), config)

    with interruptible(reached.describe), ExitStack() as stack:
        if folder.complete:
            return completed(folder.describe(config))
        page = None
        if options.page is not None and options.page is not False:  # 0 is a free port
            page = LaunchPage(path, int(options.page or 0) if options.page is not True else 0)
            stack.callback(page.close)  # its end comes last, and is shown
        publish(path)
        if not (shared and config.ft):  # files that only one launcher at a time may touch
            stack.enter_context(locked(path, wait if options.wait else None, look=driver))
            if waited and is_complete(path):
                return completed(f"{path} was completed by {waited}")
        take_storage(path, shared)
        tell(folder.describe(config))
        launch = _Launch(job, path, options, stack, driver)
        if page is not None:
            page.follow(launch.time)
        return _finished(launch.run(observers, reached, wanted_passes, begun_at), config)


def _finished(result: Result, config: JobConfig) -> Result:
    for line in result.warnings(config):
        tell(line)
    link_newest(result.job_dir, best.model if (best := result.best) is not None else None)
    return result


class _Launch:
    """One launch of a run: its etcd, if it brings one along, and a supervisor. `stack` ends them."""

    def __init__(
        self, job: Job | JobRecord, job_dir: Path, options: LaunchOptions, stack: ExitStack, driver: Callable[[], None]
    ) -> None:
        self.job, self.job_dir, self.options, self.stack = job, job_dir, options, stack
        self.config, self.keys = job.config, Keys(job.config.name)
        self.since, self.begins = time.time(), saved_step(job_dir, job.config) or 0
        self.embedded: EmbeddedEtcd | None = None
        self.supervisor = self._start()
        note(job_dir, "launch")
        self.supervisor.look = driver
        driver()  # etcd may have taken long
        self.time = TimeKeeper(job_dir, job.run_id, self.since, self.begins)
        stack.callback(self.time.write)

    def _start(self) -> Supervisor:
        """Starts etcd (if it is this launcher's) and the engine, and puts the run's records in order."""
        job, job_dir, keys, config = self.job, self.job_dir, self.keys, self.config
        environment = role_environment() | {"OMP_NUM_THREADS": str(config.threads)}
        run = Run(job_dir, config.storage or str(job_dir.resolve()), environment, self.options.resources)
        where = self.options.engine
        engine = (Local(self.options.fork_server) if where == "local" else engine_options(where)).open(run)
        self.stack.callback(engine.close)
        endpoints = given = self.options.endpoints(config)
        if not given:
            check_note(job_dir, keys, job.run_id, None)
            host, data = engine.host, str(job_dir / "etcd")
            if host:  # the run's folder may be on a file system of all machines, which is too slow for etcd
                folder = tempfile.TemporaryDirectory(prefix="graphft-etcd-", ignore_cleanup_errors=True)
                data = self.stack.enter_context(folder)
            engine.prepare()  # while etcd starts
            self.embedded = start_etcd(job, job_dir, data, host)
            self.stack.callback(self.embedded.stop)
            endpoints = ",".join(self.embedded.endpoints)
        client = connect(endpoints, None if given else WAIT_SECONDS)  # its own will answer
        self.stack.callback(client.close)
        if given:
            check_note(job_dir, keys, job.run_id, client)
            if config.ft:
                revoke_dead(client, keys)
        make_way(client, keys, job)
        if before := try_again(client, keys, job):
            tell(f"{keys.job} failed the last time: {before}; it tries again from its newest checkpoint")
        if self.options.pservers != 0 and not is_complete(job_dir):
            begin_anew(client, keys, job, job_dir)
        put_job(client, keys, job, job_dir)
        etcd = fenced(client, keys, job)
        write_endpoints(job_dir, endpoints, own=not given)
        engine.prepare()
        supervisor = Supervisor(job_dir, keys, etcd, endpoints, engine, self.options.max_restarts, config.ft)
        self.stack.callback(supervisor.stop)
        return supervisor

    def run(self, watching: Sequence[OnStatus], reached: Reached, wanted_passes: int | None, begun_at: float) -> Result:
        """Starts the processes, and looks after them until the job is over. Raises GraphftError if it failed."""
        config, supervisor, options = self.config, self.supervisor, self.options
        etcd = supervisor.etcd
        taken = TakenValidations(self.job_dir, etcd, self.keys, config)
        observers: list[Callable[[JobStatus], None]] = [reached.look, taken.look, self.time.look]
        display = None
        if not (log := logging.getLogger("graphft")).hasHandlers():
            log.addHandler(warnings := Warnings())
            self.stack.callback(log.removeHandler, warnings)
        if not options.quiet:
            display = Display(since=self.since)
            self.stack.callback(display.close)
            observers.append(lambda status: display.show(status, self.time.left()))
        observers += [partial(watch, supervisor) for watch in watching]
        if wanted_passes is not None:
            passes = supervisor.passes = WantedPasses(etcd, self.keys, wanted_passes)
            passes.begin()
            observers.append(lambda _: passes.keep())
        if missing := options.missing(config):
            start = f"graphft start ROLE --job {self.job_dir} --etcd {supervisor.endpoints}"
            tell(f"{missing} are to be started elsewhere, if they are not there: {start}")
        for role, index in options.counts(config).processes():
            supervisor.add(role, index)

        status = supervise(
            supervisor,
            observers,
            self.embedded,
            brief=display is None and not watching,
            begins=self.begins,
            every=STATUS_EVERY_SECONDS if watching else UNWATCHED_SECONDS,
        )
        if display is not None:
            display.close(status)
        if supervisor.failed and not config.ft:
            tell_failed(etcd, self.keys)
        why = why_failed(supervisor, status)
        if status is None or why:
            note(self.job_dir, "failed", why)
            raise GraphftError(
                f"job {self.keys.job} failed: {why}",
                rule="job-failed",
                help=f"logs of all roles are in {self.job_dir / 'logs'}",
            )
        taken.look(None)
        fetch_result(self.job_dir)
        if config.validate is not None:
            delete_entries(self.job_dir)
        discarded = discarded_of(config, status.discarded)
        result = Result.of(self.job_dir, status.step, time.monotonic() - begun_at, discarded)
        if display is not None:
            display.console.print(result.describe(status.generation), soft_wrap=True)
        return result
