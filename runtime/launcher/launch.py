"""Running a job: as one role of it, or with all of its roles on this machine."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, UsageError
from graphft.runtime.callbacks.callbacks import NAMES, OF_A_LAUNCH, Callbacks
from graphft.runtime.checkpoint.saved_step import saved_step
from graphft.runtime.coordination.connect import WAIT_SECONDS, connect, is_complete, write_endpoints
from graphft.runtime.coordination.discarded import discarded_of
from graphft.runtime.coordination.embedded_etcd import start_etcd
from graphft.runtime.coordination.entries_folder import delete_entries
from graphft.runtime.coordination.job_storage import MODEL, fetch_result, publish, withdraw
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.lost_rows import read_lost_rows
from graphft.runtime.coordination.noted_etcd import check_no_other_etcd
from graphft.runtime.coordination.run_record import fenced, put_job
from graphft.runtime.coordination.stale_run import begin_anew, make_way, revoke_dead, tell_failed, try_again
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.coordination.storage_claim import StorageClaim, claimed, forget_claim
from graphft.runtime.coordination.wanted_passes import WantedPasses
from graphft.runtime.engines.base import Engine, Run, engine_options
from graphft.runtime.engines.local import Local
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.launcher.act_as_role import act_as_role
from graphft.runtime.launcher.asked_passes import AskedPasses, PassesDone
from graphft.runtime.launcher.ending import Reached, heed, interruptible, without_traceback
from graphft.runtime.launcher.folder_status import look_at
from graphft.runtime.launcher.job_folder import JobFolder, open_folder
from graphft.runtime.launcher.launch_page import LaunchPage, page_of
from graphft.runtime.launcher.loud_events import LoudEvents
from graphft.runtime.launcher.options import CALLED, LaunchOptions, choose_options
from graphft.runtime.launcher.process_counts import MissingProcesses, check_counts
from graphft.runtime.launcher.process_ends import lost_checkpoints, note_failed, note_launch, note_lost_rows
from graphft.runtime.launcher.result import Result
from graphft.runtime.launcher.supervise import supervise, why_failed
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.launcher.taken_validations import TakenValidations, missing_validations
from graphft.runtime.launcher.tell import tell
from graphft.runtime.launcher.told_launch import ToldLaunch
from graphft.runtime.page.time_keeper import TimeKeeper
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.role_environment import role_environment
from graphft.runtime.process.role_process import EXIT_OK, hear_of_children
from graphft.runtime.process.structs import prepare_structs

if TYPE_CHECKING:
    from graphft.runtime.launcher.display import Display
    from graphft.transpiler import Job, JobConfig, JobRecord

log = logging.getLogger("graphft")


def run_job(
    job: Job,
    *,
    options: LaunchOptions | None = None,
    on_status: Callable[[Supervisor, JobStatus], None] | None = None,
    callbacks: Sequence[Any] | None = None,
    **overrides: Any,
) -> Result:
    """Runs `job` to its end with all roles on this machine, and returns its result.

    With GRAPHFT_ROLE (or torchrun's RANK) in the environment, this process is that one role instead, and exits
    with it. `overrides` are fields of `LaunchOptions`. `on_status` sees each status as the display does, the last
    one too, with the supervisor, whose `add` and `signal` may be used. `callbacks`: see
    `graphft.runtime.callbacks.callbacks.Callbacks`; an epoch is a pass. Raises GraphftError if the job fails, and
    Interrupted (a KeyboardInterrupt) on Ctrl-C and SIGTERM.
    """
    _note_called()
    try:
        _check_not_imported()
        act_as_role(job, overrides)
        told = Callbacks(callbacks, NAMES if job.config.validate is not None else OF_A_LAUNCH)
        if told:
            from graphft.loss_results import check_told, reported

            check_told(reported(job.trainer_program()))
        return _run_here(job, choose_options(options, overrides), on_status, told)
    except GraphftError as error:
        without_traceback(error)
        raise


def prepare(job: Job, options: LaunchOptions) -> tuple[Job, JobFolder, LaunchOptions]:
    """For who launches the job itself, with `launch_directory`: the job as its folder has it, its folder, and the
    options with what the command line says. A process that is a role of it ends here."""
    _note_called()
    try:
        _check_not_imported()
        act_as_role(job, {})
        chosen = choose_options(None, options.given())
        job, folder = _open(job, chosen)
        return job, folder, chosen
    except GraphftError as error:
        without_traceback(error)
        raise


def _note_called() -> None:
    os.environ[CALLED] = "1"


def _open(job: Job, chosen: LaunchOptions) -> tuple[Job, JobFolder]:
    """The job's folder, and the job that is saved there."""
    from graphft.transpiler import Job

    check_processes(job, chosen)
    check_passes(job, chosen)
    with interruptible(lambda: "interrupted before the job was started; run again"):  # large data take a while
        folder = open_folder(job, chosen.job_dir, resume=chosen.resume, fresh=chosen.fresh)
        wanted, job = job, Job.load(folder.path)  # a run goes on as it began: its id is the folder's; name, etcd, too
    if wanted.config.exact != job.config.exact:
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


def _run_here(
    job: Job, chosen: LaunchOptions, on_status: Callable[[Supervisor, JobStatus], None] | None, callbacks: Callbacks
) -> Result:
    job, folder = _open(job, chosen)
    if job.config.passes_on_demand and chosen.passes is None:
        chosen = chosen.with_passes(job.config.passes)
    try:
        if not callbacks:
            return launch_directory(job, folder, chosen, on_status)
        with ToldLaunch(callbacks, job, folder.path, on_status) as told:
            result = launch_directory(job, folder, chosen, told.look)
            with interruptible(Reached(folder.path, job.config).describe):  # the last callbacks may take their time
                told.finish(result.steps)
        return result
    except GraphftError as error:
        if folder.made and error.rule == "foreign-job":  # nothing was begun: no later script is to find a run here
            withdraw(folder.path)
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def check_passes(job: Job | JobRecord, options: LaunchOptions) -> None:
    if options.passes is not None and not job.config.passes_on_demand:
        raise UsageError(
            f"passes is {options.passes}, but all {job.config.passes} passes of this job follow one another",
            rule="option",
            help="leave it out, or transpile with passes_on_demand=True",
        )


def _check_not_imported() -> None:
    """Raises UsageError when a script runs its job while it is imported for a Dataset that it defines."""
    from graphft.data_reference import being_imported

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


def launch_directory(
    job: Job | JobRecord,
    folder: JobFolder,
    options: LaunchOptions,
    on_status: Callable[[Supervisor, JobStatus], None] | None = None,
    *,
    driver: Callable[[], None] | None = None,
) -> Result:
    """Says what is run, starts etcd if needed and all roles of a saved job; returns when it is complete. Where passes
    are on demand, it returns when those that `options` ask for are done, unless it has a `driver`: then more will be.
    That is called again and again, while it waits for another launcher and while it works (but not while etcd
    starts): what it raises ends the launch.

    If another launcher runs it, that one's end is waited for. Raises Interrupted on Ctrl-C and SIGTERM.
    """
    prepare_structs()
    hear_of_children()
    begun_at, claim = time.monotonic(), None
    reached = Reached(folder.path, job.config)
    waited: list[str] = []
    look = driver or heed

    def wait(holder: str) -> None:
        tell(f"{folder.path} is being run by {holder}; waiting (--no-wait or wait=False: an error)")
        waited.append(holder)

    with interruptible(reached.describe), ExitStack() as stack:
        page = stack.enter_context(page_of(folder.path, options.page))  # its end comes last, and is shown
        publish(folder.path)
        if not (options.endpoints(job.config) and job.config.ft):  # files that only one launcher at a time may touch
            stack.enter_context(locked(folder.path, wait if options.wait else None, look=look))
            if not options.endpoints(job.config):
                check_no_other_etcd(folder.path, job)
            claim = stack.enter_context(claimed(folder.path, wait if options.wait else None, look))
            if waited and is_complete(folder.path):
                fetch_result(folder.path)
                tell(f"{folder.path} was completed by {waited[0]}")
                seconds = time.monotonic() - begun_at
                return _told(Result.of(folder.path, job.config.total_steps, seconds), job)
        else:
            forget_claim(folder.path)
        running = _joined(folder, job, options)
        if running is None and driver is None:
            _check_not_lost(folder.path, job.config)
        tell(folder.describe(job.config) if running is None else f"joining {folder.path}, which is running, {running}")
        asked = None if driver is not None else AskedPasses.of(job.config, folder.path, options.passes)
        return _launch(job, folder.path, options, on_status, reached, claim, asked, page, look, stack)


def _joined(folder: JobFolder, job: Job | JobRecord, options: LaunchOptions) -> str | None:
    """On an etcd of the user's other launchers may run the job already: where it is, in words. Then this one joins."""
    found = look_at(folder.path) if options.endpoints(job.config) else None
    return found.where if found is not None and found.state == "running" else None


def _check_not_lost(job_dir: Path, config: JobConfig) -> None:
    """Raises GraphftError where a Trainer has had checkpoints that are gone: initial values are no state to go on
    from, and nobody would be told ever after."""
    step = saved_step(job_dir, config)
    if step == 0 and (lost := lost_checkpoints(job_dir, step)):
        raise GraphftError(
            f"the checkpoints of {job_dir} {lost}, and it did have some",
            rule="checkpoint",
            help="bring them back; if they are gone for good, begin a new run: --fresh, or another name",
        )


def _launch(
    job: Job | JobRecord,
    job_dir: Path,
    options: LaunchOptions,
    on_status: Callable[[Supervisor, JobStatus], None] | None,
    reached: Reached,
    claim: StorageClaim | None,
    asked: AskedPasses | None,
    page: LaunchPage | None,
    driver: Callable[[], None],
    stack: ExitStack,
) -> Result:
    """Starts everything, and hands it to `stack`, which ends it: etcd, roles, display."""
    started, since, begins = time.monotonic(), time.time(), saved_step(job_dir, job.config) or 0
    keys = Keys(job.config.name)
    try:
        supervisor, embedded = _start(job, job_dir, options, keys, stack)
    except KeyboardInterrupt:  # a launch, too: its last words say that the run can be gone on with
        note_launch(job_dir)
        raise
    supervisor.look = driver
    note_launch(job_dir)
    driver()  # etcd may have taken long
    keeper = TimeKeeper(job_dir, supervisor.etcd, keys, job.run_id, since, begins)
    stack.callback(keeper.write)
    if page is not None:
        page.follow(keeper)
    counts = options.counts(job.config)
    for role, index in counts.processes():
        supervisor.add(role, index)
    display = None if options.quiet else _display(since)
    if display is not None:
        stack.callback(display.close)
    missing = MissingProcesses(job_dir, supervisor.endpoints, counts, tell)
    loud = LoudEvents(supervisor.etcd, keys, since, tell) if options.quiet else None
    if loud is not None:
        stack.callback(loud.look, last=True)  # while etcd is there

    taken = TakenValidations(job_dir, supervisor.etcd, keys, job.config)

    def look(supervisor: Supervisor, status: JobStatus) -> None:
        reached.status = status
        taken.look(status)
        keeper.look(status)
        if display is not None:
            display.show(status, keeper.left())
        missing.look(status)
        if loud is not None:
            loud.look()
        if supervisor.passes is not None:
            supervisor.passes.keep()
        if claim is not None and claim.lost:
            supervisor.failed = supervisor.failed or claim.lost
        if on_status is not None:
            on_status(supervisor, status)
        if asked is not None:
            asked.look(supervisor, status)

    brief = display is None and on_status is None
    try:
        status = supervise(supervisor, supervisor.etcd, keys, look, embedded, brief, begins)
    except PassesDone:
        assert asked is not None
        return asked.result(supervisor.etcd, keys, time.monotonic() - started)
    if display is not None:
        display.close(status)
    if supervisor.failed and not job.config.ft:
        tell_failed(supervisor.etcd, keys)
    if status is None or (why := why_failed(supervisor, status)):
        note_failed(job_dir, why)
        raise GraphftError(
            f"job {keys.job} failed: {why}", rule="job-failed", help=f"logs of all roles are in {job_dir / 'logs'}"
        )
    taken.look(None)
    fetch_result(job_dir)
    if job.config.validate is not None:
        delete_entries(job_dir)
    lost_rows = read_lost_rows(supervisor.etcd, keys)
    note_lost_rows(job_dir, lost_rows)
    left_out = discarded_of(job.config, status.left_out)
    result = Result.of(job_dir, status.step, time.monotonic() - started, left_out, lost_rows)
    if display is not None:
        display.console.print(result.describe(status.generation), soft_wrap=True)
    return _told(result, job)


def _told(result: Result, job: Job | JobRecord) -> Result:
    """After a line for each thing that the job did without."""
    lost = result.lost(job.config.data.records) + missing_validations(result.job_dir, job.config, result.steps)
    for line in filter(None, (*lost, result.missing_best())):
        tell(line)
    return result


def _start(
    job: Job | JobRecord, job_dir: Path, options: LaunchOptions, keys: Keys, stack: ExitStack
) -> tuple[Supervisor, EmbeddedEtcd | None]:
    """etcd (if it is this launcher's), the run's records, the engine; a supervisor without processes so far."""
    engine = _open_engine(job, job_dir, options)
    stack.callback(engine.close)
    given, embedded = options.endpoints(job.config), None
    if not (endpoints := given):
        host, data = engine.host, str(job_dir / "etcd")
        if host:  # the job's folder may be on a file system of all machines, which is too slow for etcd
            data = stack.enter_context(tempfile.TemporaryDirectory(prefix="graphft-etcd-", ignore_cleanup_errors=True))
        engine.prepare()  # while etcd starts
        embedded = start_etcd(job, job_dir, data, host)
        stack.callback(embedded.stop)
        endpoints = ",".join(embedded.endpoints)
    client = connect(endpoints, WAIT_SECONDS if embedded is not None else None)  # its own will answer
    stack.callback(client.close)
    if embedded is None:
        check_no_other_etcd(job_dir, job, client)
    if embedded is None and job.config.ft:
        revoke_dead(client, keys)
    make_way(client, keys, job)
    if before := try_again(client, keys, job):
        log.warning("%s failed the last time: %s; it tries again from its newest checkpoint", keys.job, before)
    if options.pservers != 0 and not is_complete(job_dir) and begin_anew(client, keys, job, job_dir):
        _tell_of_lost_model(job, job_dir)
    put_job(client, keys, job, job_dir)
    etcd = fenced(client, keys, job)
    write_endpoints(job_dir, endpoints, own=not given)
    engine.prepare()
    supervisor = Supervisor(job_dir, keys, etcd, endpoints, engine, options.max_restarts, job.config.ft)
    if options.passes is not None:  # else who asks for the epochs is somebody else, or nobody has to
        supervisor.passes = WantedPasses(etcd, keys, options.passes)
        supervisor.passes.begin()
    stack.callback(supervisor.close)
    return supervisor, embedded


def _open_engine(job: Job | JobRecord, job_dir: Path, options: LaunchOptions) -> Engine:
    environment = role_environment() | {"OMP_NUM_THREADS": str(job.config.threads)}
    run = Run(job_dir, job.config.storage or str(job_dir.resolve()), environment, options.resources)
    chosen = Local(options.fork_server) if options.engine == "local" else engine_options(options.engine)
    return chosen.open(run)


def _tell_of_lost_model(job: Job | JobRecord, job_dir: Path) -> None:
    step = saved_step(job_dir, job.config)
    how = f"made again, from the checkpoint of step {step}" if step else "TRAINED again: no checkpoint is whole"
    tell(f"{job_dir} was complete, and its {MODEL} is gone: it is {how}")


def _display(since: float) -> Display:
    from graphft.runtime.launcher.display import Display

    return Display(since=since)
