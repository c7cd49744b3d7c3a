"""Running a job: as one role of it, or with all of its roles on this machine."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from graphft.errors import GraphftError, UsageError
from graphft.fileio import tensor_file_metadata
from graphft.runtime.coordination.connect import connect, is_complete, write_endpoints
from graphft.runtime.coordination.embedded_etcd import start_etcd
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import fenced, put_job
from graphft.runtime.coordination.stale_run import begin_anew, make_way, revoke_dead, tell_failed, try_again
from graphft.runtime.coordination.status import JobStatus, read_status
from graphft.runtime.etcd import EmbeddedEtcd, EtcdError, Store
from graphft.runtime.launcher.etcd_keeper import EtcdKeeper
from graphft.runtime.launcher.fork_server import SUPPORTED, ForkServer
from graphft.runtime.launcher.supervisor import Supervisor
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.identity import Identity
from graphft.runtime.process.role_environment import role_environment
from graphft.runtime.process.role_process import EXIT_OK, EXIT_USAGE
from graphft.runtime.process.structs import prepare_structs

if TYPE_CHECKING:
    from graphft.runtime.launcher.display import Display
    from graphft.transpiler import Job, JobRecord

log = logging.getLogger("graphft")

STATUS_EVERY_SECONDS = 0.5
EXIT_GRACE_SECONDS = 30.0
LOOK_SECONDS = 1.0
"""For how long one read of the display may keep this process from looking after its children and etcd."""


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How many processes to start here, and where. None: what the job says."""

    trainers: int | None = None
    pservers: int | None = None
    etcd: str = ""
    job_dir: str = ""
    max_restarts: int = 3
    quiet: bool = False
    fork_server: bool = True
    """Make roles by forking a process that has loaded everything: each starts in a fraction of a second."""
    save_only: bool = False
    """Write the job's folder and end there, instead of running it."""

    def __post_init__(self) -> None:
        for name in ("trainers", "pservers", "max_restarts"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise GraphftError(f"{name} is {value}, expected 0 or more", rule="option", help=f"correct {name}")

    @staticmethod
    def from_environment() -> LaunchOptions:
        """What `graphft launch` was called with; defaults when the script was started directly."""
        data = json.loads(os.environ.get("GRAPHFT_LAUNCH", "{}"))
        return LaunchOptions(**data)


@dataclass(frozen=True)
class Result:
    """A completed job. `model` is the trained model's safetensors state_dict; `losses` has (step, slot, loss)."""

    job_dir: Path
    model: Path
    steps: int
    seconds: float
    failures: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)

    @property
    def skipped_steps(self) -> int:
        """Steps (async: batches, units) that were left out because a loss or a gradient was not finite: as the model's
        file says. 0 unless on_nonfinite="skip"."""
        return int(tensor_file_metadata(self.model).get("skipped_steps", 0))

    @property
    def losses(self) -> list[tuple[int, int, float]]:
        """(step, slot, loss), each (step, slot) once, from the metrics that trainers of this machine wrote."""
        return losses_of(self.job_dir)


def losses_of(job_dir: Path) -> list[tuple[int, int, float]]:
    """(step, slot, loss) of the job in this folder, as `Result.losses`."""
    found: dict[tuple[int, int], float] = {}
    for path in sorted((job_dir / "metrics").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # the last line of a killed trainer may be cut off
                row = json.loads(line)
                found[row["step"], row["slot"]] = row["loss"]
    return [(step, slot, loss) for (step, slot), loss in sorted(found.items())]


def choose_directory(job: Job, wanted: str = "") -> Path:
    """The job's folder: an unfinished run of this very job is resumed, anything else gets a new folder.

    Raises GraphftError if `wanted` holds another job, or one that is complete, and when a folder cannot be read.
    """
    if wanted:
        other = _other_than(job, Path(wanted))
        if other:
            raise UsageError(
                f"{wanted} holds {other}", rule="job-directory", help="choose another directory, or delete this one"
            )
        return Path(wanted)
    base, n = Path("jobs") / job.config.name, 1
    path = base
    while other := _other_than(job, path):
        if not is_complete(path):
            go_on = f" (to go on with it: graphft launch --job {path})" if (path / "job.json").exists() else ""
            log.warning("%s holds %s; it stays as it is%s", path, other, go_on)
        n += 1
        path = base.with_name(f"{base.name}-{n}")
    return path


def _other_than(job: Job, path: Path) -> str:
    """What a folder holds that keeps `job` from being run in it, in words; "" if nothing does."""
    from graphft.transpiler import read_record
    from graphft.transpiler.fingerprint import differences

    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return ""
    try:
        found = read_record(path)
    except GraphftError as error:
        if error.rule == "storage":  # it may be this very job, and is not to be begun anew elsewhere
            raise
        return f"something else ({error.message})"
    changed = differences(found.fingerprint, job.fingerprint, found.config, job.config)
    if changed:
        unseeded = job.fingerprint.unseeded and found.fingerprint.unseeded
        why = " (the script draws them without a seed: torch.manual_seed makes them the same each time)"
        return f"another job, which differs in {', '.join(changed)}" + why * (
            unseeded and changed[-1].startswith("initial value")
        )
    return "a job that is complete" if is_complete(path) else ""


def run_job(
    job: Job,
    *,
    options: LaunchOptions | None = None,
    on_status: Callable[[Supervisor, JobStatus], None] | None = None,
    **overrides: Any,
) -> Result:
    """Runs `job` to its end with all roles on this machine, and returns its result.

    With GRAPHFT_ROLE (or torchrun's RANK) in the environment, this process is that one role instead, and exits
    with it. `overrides` are fields of `LaunchOptions`. `on_status` sees each status as the display does, the last
    one too, with the supervisor, whose `add` and `signal` may be used. Raises GraphftError if the job fails.
    """
    from graphft.transpiler import Job

    _act_as_role(job)
    chosen = _chosen(job, options, overrides)
    job_dir, new = _save(job, chosen.job_dir)
    wanted, job = job, Job.load(job_dir)  # a run goes on as it began: its id is the folder's, so are its name and etcd
    if wanted.config.exact != job.config.exact:
        log.warning(
            '%s goes on as it began, with exact=%s; to change that: "exact": %s in %s, on every host',
            job_dir,
            job.config.exact,
            str(wanted.config.exact).lower(),
            job_dir / "job.json",
        )
    if chosen.save_only:
        print(f"saved to {job_dir}")
        sys.exit(EXIT_OK)
    try:
        return launch_directory(job, job_dir, chosen, on_status)
    except GraphftError as error:
        if new and error.rule == "foreign-job":  # nothing was begun: no later script is to find an unfinished run here
            shutil.rmtree(job_dir, ignore_errors=True)
        raise


def _save(job: Job, wanted: str) -> tuple[Path, bool]:
    """The job's folder, and whether it was made for it now."""
    while True:
        path = choose_directory(job, wanted)
        if (path / "job.json").exists():
            return path, False
        try:
            job.save(path)
            return path, True
        except GraphftError as error:
            if wanted or error.rule != "job-directory":
                raise  # else another script, started at the same time, has just taken that folder


def _act_as_role(job: Job) -> None:
    """If the environment names a role, this process is that role, and ends with it."""
    from graphft.runtime.roles.environment import role_of_environment, run_as_role

    try:
        role = role_of_environment(os.environ, job.config.pservers)
        status = run_as_role(job, role) if role is not None else None
    except GraphftError as error:
        print(error, file=sys.stderr)
        status = EXIT_USAGE
    if status is not None:
        sys.exit(status)


def _chosen(job: Job, options: LaunchOptions | None, overrides: dict[str, Any]) -> LaunchOptions:
    known = LaunchOptions.__dataclass_fields__
    unknown = [name for name in overrides if name not in known]
    if unknown:
        raise GraphftError(f"run has no option {unknown[0]}", rule="option", help=f"it has {', '.join(known)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    chosen = replace(options or LaunchOptions.from_environment(), **given)
    return chosen if chosen.etcd else replace(chosen, etcd=",".join(job.config.etcd_endpoints or ()))


def launch_directory(
    job: Job | JobRecord,
    job_dir: Path,
    options: LaunchOptions,
    on_status: Callable[[Supervisor, JobStatus], None] | None = None,
) -> Result:
    """Starts etcd if needed and all roles of a saved job; returns when it is complete."""
    prepare_structs()
    started = time.monotonic()
    keys = Keys(job.config.name)
    with ExitStack() as stack:
        endpoints = options.etcd or ",".join(job.config.etcd_endpoints or ())
        embedded = None
        if not job.config.ft:
            _check_without_ft(job, options)
        if not endpoints or not job.config.ft:  # there are files that only one launcher at a time may touch
            stack.enter_context(locked(job_dir))
        environment = role_environment() | {"OMP_NUM_THREADS": str(job.config.threads)}
        fork_server = None
        if not endpoints:
            fork_server = _fork_server(job_dir, environment, options, stack)  # it loads while etcd starts
            embedded = start_etcd(job, job_dir)
            stack.callback(embedded.stop)
            endpoints = ",".join(embedded.endpoints)
        client = connect(endpoints)
        stack.callback(client.close)
        if embedded is None and job.config.ft:
            revoke_dead(client, keys)
        make_way(client, keys, job)
        if before := try_again(client, keys, job):
            log.warning("%s failed the last time: %s; it tries again from its newest checkpoint", keys.job, before)
        if embedded is None and options.pservers != 0 and not is_complete(job_dir):
            begin_anew(client, keys, job, job_dir)
        put_job(client, keys, job, job_dir)
        etcd = fenced(client, keys, job)
        write_endpoints(job_dir, endpoints)
        fork_server = fork_server or _fork_server(job_dir, environment, options, stack)
        supervisor = Supervisor(
            job_dir, keys, etcd, endpoints, environment, options.max_restarts, job.config.ft, fork_server
        )
        stack.callback(supervisor.close)
        _stop_on_signals(stack)
        for index in range(options.pservers if options.pservers is not None else job.config.pservers):
            supervisor.add("pserver", index)
        for index in range(options.trainers if options.trainers is not None else job.config.trainers):
            supervisor.add("trainer", index)
        display = None if options.quiet else _display()
        if display is not None:
            stack.callback(display.close)
        status = _supervise(supervisor, etcd, keys, display, on_status, embedded)
        if display is not None:
            display.close(status)
        if supervisor.report.failed and not job.config.ft:
            tell_failed(etcd, keys)
        if supervisor.report.failed or status is None or status.state != "complete":
            raise GraphftError(
                f"job {keys.job} failed: {_why(supervisor, status)}",
                rule="job-failed",
                help=f"logs of all roles are in {job_dir / 'logs'}",
            )
        result = Result(
            job_dir,
            job_dir / "model.safetensors",
            status.step,
            time.monotonic() - started,
            dict(supervisor.report.failures),
            dict(supervisor.report.preemptions),
        )
        if display is not None:
            display.console.print(_summary(result, status), soft_wrap=True)
        elif result.skipped_steps:
            log.warning("%s of %s steps were SKIPPED as not finite", result.skipped_steps, result.steps)
        return result


def _why(supervisor: Supervisor, status: JobStatus | None) -> str:
    return supervisor.report.failed or (status.failure if status is not None else "") or "it did not complete"


def _fork_server(
    job_dir: Path, environment: Mapping[str, str], options: LaunchOptions, stack: ExitStack
) -> ForkServer | None:
    if not (options.fork_server and SUPPORTED):
        return None
    fork_server = ForkServer(job_dir, environment)
    stack.callback(fork_server.close)
    return fork_server


def _display() -> Display:
    from graphft.runtime.launcher.display import Display

    return Display()


def _check_without_ft(job: Job | JobRecord, options: LaunchOptions) -> None:
    if job.config.sync and options.trainers not in (None, 0, job.config.trainers):
        raise GraphftError(
            f"{options.trainers} trainers cannot run a job of {job.config.trainers} without fault "
            "tolerance: each computes its own part of every step",
            rule="option",
            help=f"start {job.config.trainers}, or use ft=True, where any number will do",
        )


def _supervise(
    supervisor: Supervisor,
    etcd: Store,
    keys: Keys,
    display: Display | None,
    on_status: Callable[[Supervisor, JobStatus], None] | None,
    embedded: EmbeddedEtcd | None,
) -> JobStatus | None:
    status, next_status, complete_at = None, 0.0, None
    keeper = EtcdKeeper(embedded) if embedded is not None else None
    while not supervisor.all_done and not supervisor.report.failed:
        supervisor.step(0.2)
        if keeper is not None:
            keeper.step()
        if time.monotonic() < next_status:
            continue
        next_status = time.monotonic() + STATUS_EVERY_SECONDS
        seen = _look(etcd, keys, status, brief=display is None and on_status is None)
        if keeper is not None:
            keeper.heard(seen is not status)
        if seen is None:
            continue
        if seen is not status:
            supervisor.replace_frozen(_registered(seen))  # also when it is complete: what is stopped never ends
            if seen.state == "running" and embedded is not None:  # no process elsewhere can reach it
                supervisor.expect_trainers(bool(seen.trainers or seen.loading))
        status = seen
        supervisor.take_progress(status.step, sum(shard.get("applied", 0) for shard in status.pservers.values()))
        if display is not None:
            display.show(status)
        if on_status is not None:
            on_status(supervisor, status)
        if status.state == "failed":
            told = status.failure or "a role reported that the job cannot go on"
            supervisor.report.failed = supervisor.report.failed or told
        if status.state == "complete":
            complete_at = complete_at or time.monotonic()
            if time.monotonic() - complete_at > EXIT_GRACE_SECONDS:
                break
    last = _look(etcd, keys, status)
    if on_status is not None and last is not None:
        on_status(supervisor, last)
    return last


def _registered(status: JobStatus) -> set[Identity]:
    members = [*status.pservers.values(), *status.trainers.values()]
    return {msgspec.convert(member["process"], Identity) for member in members}


def _look(etcd: Store, keys: Keys, last: JobStatus | None, brief: bool = False) -> JobStatus | None:
    try:
        return read_status(etcd, keys, deadline=LOOK_SECONDS, brief=brief)
    except EtcdError:
        return last  # etcd is away for a moment: the display waits, the job decides for itself


def _stop_on_signals(stack: ExitStack) -> None:
    """SIGTERM ends like Ctrl-C, so that children and etcd are stopped in order."""
    if threading.current_thread() is not threading.main_thread():
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    stack.callback(signal.signal, signal.SIGTERM, before)


def _summary(result: Result, status: JobStatus) -> str:
    failures, preemptions = sum(result.failures.values()), sum(result.preemptions.values())
    parts = [
        f"complete: {result.steps} steps in {result.seconds:.1f} s",
        f"{preemptions} preemptions",
        f"{failures} failures",
        f"generation {status.generation}",
    ]
    if result.skipped_steps:
        parts.append(f"{result.skipped_steps} steps SKIPPED as not finite")
    poisoned = status.queue.get("failed", 0)
    if poisoned:
        parts.append(f"{poisoned} chunks DISCARDED as poison")
    return f"{', '.join(parts)}\nmodel: {result.model}"
