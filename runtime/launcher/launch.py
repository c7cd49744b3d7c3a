"""Running a job: as one role of it, or with all of its roles on this machine."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, UsageError, without_traceback
from graphft.runtime.callbacks.callbacks import NAMES, OF_A_LAUNCH, Callbacks
from graphft.runtime.callbacks.cursor import FILE as TOLD
from graphft.runtime.checkpoint.store import saved_step
from graphft.runtime.coordination.connect import NOTE, WAIT_SECONDS, check_note, connect, read_note, write_endpoints
from graphft.runtime.coordination.discarded import discarded_of
from graphft.runtime.coordination.job_storage import MODEL, delete_entries, fetch_result, is_complete, publish
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import fenced, put_job
from graphft.runtime.coordination.runs import link_newest
from graphft.runtime.coordination.stale_run import begin_anew, make_way, revoke_dead, start_etcd, tell_failed, try_again
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.coordination.storage_fence import StorageFence, forget_launcher, take_storage
from graphft.runtime.coordination.taken_validations import TakenValidations
from graphft.runtime.coordination.wanted_passes import WantedPasses, check_asked_for
from graphft.runtime.engines.base import Engine, Run, engine_options
from graphft.runtime.engines.local import Local
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.launcher.act_as_role import act_as_role
from graphft.runtime.launcher.callback_observer import CallbackObserver
from graphft.runtime.launcher.ending import Reached, interruptible
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.launcher.options import CALLED, LaunchOptions, choose_options
from graphft.runtime.launcher.process_counts import MissingProcesses, check_counts
from graphft.runtime.launcher.process_ends import note_failed, note_launch
from graphft.runtime.launcher.result import Result, steps_of
from graphft.runtime.launcher.run_folder import RunFolder, open_run, saved_run
from graphft.runtime.launcher.supervise import STATUS_EVERY_SECONDS, supervise, why_failed
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.launcher.tell import WaitsOfQuietLaunch, tell
from graphft.runtime.page.time_keeper import TimeKeeper
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.role_process import EXIT_OK, hear_of_children, role_environment
from graphft.runtime.process.threads import prepare_structs

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobConfig, JobRecord

log = logging.getLogger("graphft")

UNWATCHED_SECONDS = 1.0
"""Between two looks at a job's status where no callback waits for it."""
OnStatus = Callable[[Supervisor, JobStatus], None]


def run_job(
    job: Job,
    *,
    options: LaunchOptions | None = None,
    on_status: OnStatus | None = None,
    callbacks: Sequence[Any] | None = None,
    **overrides: Any,
) -> Result:
    """Runs `job` to its end with all roles on this machine, and returns its result. The result of the newest run of the
    very job is returned at once if that is complete (`fresh=True` begins another).

    With GRAPHFT_ROLE (or torchrun's RANK) in the environment, this process is that one role instead, and exits
    with it. `overrides` are fields of `LaunchOptions`. `on_status` sees each status as the display does, the last
    one too, with the supervisor, whose `add` and `signal` may be used. `callbacks`: see
    `graphft.runtime.callbacks.callbacks.Callbacks`; an epoch is a pass. Raises GraphftError if the job fails, and
    Interrupted (a KeyboardInterrupt) on Ctrl-C and SIGTERM.
    """
    os.environ[CALLED] = "1"
    try:
        _check_not_imported()
        act_as_role(job, overrides)
        told = Callbacks(callbacks, NAMES if job.config.validate is not None else OF_A_LAUNCH)
        if told:
            from graphft.capture.loss_results import check_told, reported

            check_told(reported(job.trainer_program()))
        return _run_here(job, choose_options(options, overrides), on_status, told)
    except GraphftError as error:
        without_traceback(error)
        raise


def prepare(job: Job, options: LaunchOptions) -> tuple[Job, RunFolder, LaunchOptions]:
    """Returns what one needs to launch the job itself, with `launch_run`: the job as its folder has it, its folder, and
    the options with what the command line says. A process that is a role of it ends here."""
    os.environ[CALLED] = "1"
    try:
        _check_not_imported()
        act_as_role(job, {})
        chosen = choose_options(None, options.given())
        job, folder = _open(job, chosen)
        return job, folder, with_noted_etcd(chosen, folder.path, job.config)
    except GraphftError as error:
        without_traceback(error)
        raise


def _open(job: Job, chosen: LaunchOptions) -> tuple[Job, RunFolder]:
    """The run's folder, and the job that is saved there."""
    from graphft.transpiler import Job

    check_processes(job, chosen)
    with interruptible(lambda: "interrupted before the job was started; run again"):  # large data take a while
        folder = open_run(job, chosen.job_dir, resume=chosen.resume, fresh=chosen.fresh)
        wanted, job = job, Job.load(folder.path)  # a run goes on as it began: its id is the folder's; name, etcd, too
    if wanted.config.exact != job.config.exact and not folder.complete:
        log.warning(
            '%s goes on as it began, with exact=%s; to change that: "exact": %s in %s, on every host',
            folder.path,
            job.config.exact,
            str(wanted.config.exact).lower(),
            folder.path / "job.json",
        )
    if chosen.save_only:
        print(f"saved to {folder.path}")
        sys.exit(EXIT_OK)
    return job, folder


def _run_here(job: Job, chosen: LaunchOptions, on_status: OnStatus | None, callbacks: Callbacks) -> Result:
    job, folder = _open(job, chosen)
    wanted = job.config.passes if job.config.passes_on_demand else None
    if not callbacks:
        return launch_run(job, folder, chosen, on_status, wanted_passes=wanted)
    with CallbackObserver(callbacks, job, folder.path, on_status) as observer:
        result = launch_run(job, folder, chosen, observer.look, wanted_passes=wanted)
        with interruptible(Reached(folder.path, job.config).describe):  # the last callbacks may take their time
            observer.finish(result.steps)
    return result


def launch_saved(path: Path, options: LaunchOptions) -> None:
    """Runs the job in a run's folder to its end, without its script. Raises GraphftError if it cannot, or fails."""
    from graphft.transpiler import read_record

    record = read_record(path)
    folder = saved_run(path, resume=options.resume, fresh=options.fresh)
    if folder.complete:
        fetch_result(path)
        link_newest(path)
        print(f"{path} is complete: {path / MODEL}")
        return
    options = with_noted_etcd(options, path, record.config)
    check_processes(record, options)
    if not options.endpoints(record.config):
        check_asked_for(record.config, path, "run that script again")
    if (path / TOLD).exists():
        tell(f"the callbacks of the script that began {path} are NOT called here: run that script, if they are to be")
    launch_run(record, folder, options)


def _check_not_imported() -> None:
    """Raises UsageError when a script runs its job while it is imported for a Dataset that it defines."""
    from graphft.data import being_imported

    file = being_imported()
    if file:
        raise UsageError(
            f"{file} calls job.run() when it is imported, and every trainer imports it: for the Dataset in it",
            rule="main-guard",
            help="put what is to run once below `if __name__ == '__main__':`",
        )


def check_processes(job: Job | JobRecord, options: LaunchOptions) -> None:
    if not options.save_only:
        check_counts(job.config, options.counts(job.config), embedded=not options.endpoints(job.config))


def with_noted_etcd(options: LaunchOptions, job_dir: Path, config: JobConfig) -> LaunchOptions:
    """The run goes on in the user's etcd in which it began, unless the options say another one."""
    note = read_note(job_dir)
    if not note.endpoints or note.own or options.endpoints(config):
        return options
    tell(f"{job_dir / NOTE}: this run is in the etcd {note.endpoints}")
    return replace(options, etcd=note.endpoints)


def launch_run(
    job: Job | JobRecord,
    folder: RunFolder,
    options: LaunchOptions,
    on_status: OnStatus | None = None,
    *,
    wanted_passes: int | None = None,
    driver: Callable[[], None] = lambda: None,
) -> Result:
    """Says what is run, starts etcd if needed and all roles of a saved job; returns when it is complete.
    `wanted_passes`: how many may begin, where they are on demand; None: another launch says. `driver` is called again
    and again, while it waits for another launcher and while it works (but not while etcd starts): what it raises ends
    the launch.

    If another launcher runs it, that one's end is waited for. Raises Interrupted on Ctrl-C and SIGTERM.
    """
    prepare_structs()
    hear_of_children()
    begun_at, path, config = time.monotonic(), folder.path, job.config
    options = with_noted_etcd(options, path, config)
    reached = Reached(path, config)
    waited: list[str] = []

    def wait(holder: str) -> None:
        tell(f"{path} is being run by {holder}; waiting (--no-wait or wait=False: an error)")
        waited.append(holder)

    def complete(line: str) -> Result:
        fetch_result(path)
        tell(line)
        return _with_warnings(Result.of(path, steps_of(path, config), time.monotonic() - begun_at), config)

    with interruptible(reached.describe), ExitStack() as stack:
        if folder.complete:
            return complete(folder.describe(config))
        page = None
        if options.page is not None and options.page is not False:  # 0 is a free port
            from graphft.runtime.launcher.page_looks import LaunchPage  # most launches need none of it

            page = LaunchPage(path, int(options.page or 0) if options.page is not True else 0)
            stack.callback(page.close)  # its end comes last, and is shown
        publish(path)
        if not (options.endpoints(config) and config.ft):  # files that only one launcher at a time may touch
            stack.enter_context(locked(path, wait if options.wait else None, look=driver))
            if waited and is_complete(path):
                return complete(f"{path} was completed by {waited[0]}")
        take_storage(path) if not options.endpoints(config) else forget_launcher(path)
        running = _joined(folder, job, options)
        tell(folder.describe(config) if running is None else f"joining {path}, which is running, {running}")
        launch = _Launch(job, path, options, on_status, stack, driver, reached, begun_at)
        launch.start(wanted_passes)
        if page is not None:
            page.follow(launch.keeper)
        return _with_warnings(launch.finish(), config)


def _joined(folder: RunFolder, job: Job | JobRecord, options: LaunchOptions) -> str | None:
    """On an etcd of the user's other launchers may run the job already: where it is, in words. Then this one joins."""
    found = look_at(folder.path) if options.endpoints(job.config) else None
    return found.where if found is not None and found.state == "running" else None


def _with_warnings(result: Result, config: JobConfig) -> Result:
    """After a line for each thing that the job did without."""
    for line in result.warnings(config):
        tell(line)
    link_newest(result.job_dir, best.model if (best := result.best) is not None else None)
    return result


@dataclass
class _Launch:
    """Launches a run, from the start of etcd and its processes to its end. `stack` ends what it has started."""

    job: Job | JobRecord
    job_dir: Path
    options: LaunchOptions
    on_status: OnStatus | None
    stack: ExitStack
    driver: Callable[[], None]
    reached: Reached
    begun_at: float
    supervisor: Supervisor = field(init=False)
    embedded: EmbeddedEtcd | None = None
    keeper: TimeKeeper = field(init=False)
    since: float = 0.0
    """When it began, in Unix seconds."""
    begins: int = 0
    """The step at which the job goes on."""

    def start(self, wanted_passes: int | None) -> None:
        job, self.since, self.begins = self.job, time.time(), saved_step(self.job_dir, self.job.config) or 0
        try:
            self._start_etcd_and_engine()
        except KeyboardInterrupt:  # a launch, too: its last words say that the run can be gone on with
            note_launch(self.job_dir)
            raise
        note_launch(self.job_dir)
        self.supervisor.look = self.driver
        self.driver()  # etcd may have taken long
        self.keeper = TimeKeeper(self.job_dir, self.supervisor.etcd, self.keys, job.run_id, self.since, self.begins)
        self.stack.callback(self.keeper.write)
        if wanted_passes is not None:
            self.supervisor.passes = WantedPasses(self.supervisor.etcd, self.keys, wanted_passes)
            self.supervisor.passes.begin()
        for role, index in self.options.counts(job.config).processes():
            self.supervisor.add(role, index)

    def finish(self) -> Result:
        """Looks after the processes until the job is over. Raises GraphftError if it failed."""
        config, etcd, display = self.job.config, self.supervisor.etcd, None
        missing = MissingProcesses(self.job_dir, self.supervisor.endpoints, self.options.counts(config), tell)
        taken = TakenValidations(self.job_dir, etcd, self.keys, config)
        observers: list[Callable[[JobStatus], None]] = [self.reached.look, taken.look, self.keeper.look, missing.look]
        if self.options.quiet:
            waits = WaitsOfQuietLaunch(etcd, self.keys, self.since)
            self.stack.callback(waits.look, last=True)
            observers.append(waits.look)
        else:
            from graphft.runtime.launcher.display import Display

            display = Display(since=time.time())
            self.stack.callback(display.close)
            observers.append(lambda status: display.show(status, self.keeper.left()))
        if self.on_status is not None:
            told = self.on_status
            observers.append(lambda status: told(self.supervisor, status))
        if config.storage and not self.options.endpoints(config):
            fence = StorageFence(self.job_dir, self.supervisor.fail)
            observers.append(lambda _: fence.look())
        if self.supervisor.passes is not None:
            passes = self.supervisor.passes
            observers.append(lambda _: passes.keep())

        def look(_: Supervisor, status: JobStatus) -> None:
            for observe in observers:
                observe(status)

        brief = display is None and self.on_status is None
        every = STATUS_EVERY_SECONDS if self.on_status is not None else UNWATCHED_SECONDS
        status = supervise(self.supervisor, etcd, self.keys, look, self.embedded, brief, self.begins, every)
        if display is not None:
            display.close(status)
        if self.supervisor.failed and not config.ft:
            tell_failed(etcd, self.keys)
        if status is None or (why := why_failed(self.supervisor, status)):
            note_failed(self.job_dir, why)
            raise GraphftError(
                f"job {self.keys.job} failed: {why}",
                rule="job-failed",
                help=f"logs of all roles are in {self.job_dir / 'logs'}",
            )
        taken.look(None)
        fetch_result(self.job_dir)
        if config.validate is not None:
            delete_entries(self.job_dir)
        seconds, discarded = time.monotonic() - self.begun_at, discarded_of(config, status.discarded)
        result = Result.of(self.job_dir, status.step, seconds, discarded)
        if display is not None:
            display.console.print(result.describe(status.generation), soft_wrap=True)
        return result

    @property
    def keys(self) -> Keys:
        return Keys(self.job.config.name)

    def _start_etcd_and_engine(self) -> None:
        """etcd (if it is this launcher's), the run's records, the engine; a supervisor without processes so far."""
        job, job_dir, options, keys, config = self.job, self.job_dir, self.options, self.keys, self.job.config
        engine = self._open_engine()
        self.stack.callback(engine.close)
        given = options.endpoints(config)
        if not (endpoints := given):
            check_note(job_dir, keys, job.run_id, None)
            host, data = engine.host, str(job_dir / "etcd")
            if host:  # the run's folder may be on a file system of all machines, which is too slow for etcd
                folder = tempfile.TemporaryDirectory(prefix="graphft-etcd-", ignore_cleanup_errors=True)
                data = self.stack.enter_context(folder)
            engine.prepare()  # while etcd starts
            self.embedded = start_etcd(job, job_dir, data, host)
            self.stack.callback(self.embedded.stop)
            endpoints = ",".join(self.embedded.endpoints)
        client = connect(endpoints, WAIT_SECONDS if self.embedded is not None else None)  # its own will answer
        self.stack.callback(client.close)
        if self.embedded is None:
            check_note(job_dir, keys, job.run_id, client)
        if self.embedded is None and config.ft:
            revoke_dead(client, keys)
        make_way(client, keys, job)
        if before := try_again(client, keys, job):
            log.warning("%s failed the last time: %s; it tries again from its newest checkpoint", keys.job, before)
        if options.pservers != 0 and not is_complete(job_dir) and begin_anew(client, keys, job, job_dir):
            step = saved_step(job_dir, config)
            how = f"made again, from the checkpoint of step {step}" if step else "TRAINED again: no checkpoint is whole"
            tell(f"{job_dir} was complete, and its {MODEL} is gone: it is {how}")
        put_job(client, keys, job, job_dir)
        etcd = fenced(client, keys, job)
        write_endpoints(job_dir, endpoints, own=not given)
        engine.prepare()
        self.supervisor = Supervisor(job_dir, keys, etcd, endpoints, engine, options.max_restarts, config.ft)
        self.stack.callback(self.supervisor.close)

    def _open_engine(self) -> Engine:
        config, options = self.job.config, self.options
        environment = role_environment() | {"OMP_NUM_THREADS": str(config.threads)}
        run = Run(self.job_dir, config.storage or str(self.job_dir.resolve()), environment, options.resources)
        chosen = Local(options.fork_server) if options.engine == "local" else engine_options(options.engine)
        return chosen.open(run)
