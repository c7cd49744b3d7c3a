"""The role of this process: from GRAPHFT_ROLE and friends, from torchrun's RANK, or from the command line."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.connect import JobEnded, check_note, connect_role, note_etcd, write_endpoints
from graphft.runtime.coordination.job_files import JOBS, fetch, is_complete, publish, stored_run, take_storage
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import fenced, make_way, put_job, start_etcd
from graphft.runtime.coordination.runs import run_at, run_in
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, Store
from graphft.runtime.execute.determinism import enforce
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.role_process import BEGINS, EXIT_FAILED, EXIT_LEASE_LOST, EXIT_OK, ROLES
from graphft.runtime.process.threads import prepare_structs
from graphft.runtime.queue.transactions import claims_chunks
from graphft.runtime.roles.logs import log_as
from graphft.runtime.roles.role import Role
from graphft.transpiler.differences import differences, drawn
from graphft.transpiler.job import Job
from graphft.transpiler.record import JobRecord, read_record

LEAVE_SECONDS = 10.0
"""For how long the process that embeds etcd keeps it for others that have not left yet."""

log = logging.getLogger("graphft")


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One process: its role, its index (-1: any free one), the job's folder and etcd's endpoints ("": from there)."""

    kind: str
    index: int = -1
    job_dir: str = ""
    etcd: str = ""
    embed_etcd: bool = False


def role_of_environment(env: Mapping[str, str], pservers: int, coordinator: bool = False) -> RoleSpec | None:
    """The role that the environment names, or None when it names none. GRAPHFT_ROLE, GRAPHFT_INDEX, GRAPHFT_JOB_DIR,
    GRAPHFT_ETCD; or torchrun's RANK: the first ranks are pservers, the next one is the coordinator if the job has one
    (`coordinator`), the others are trainers; and without GRAPHFT_ETCD rank 0 starts etcd (ranks on one machine).
    `graphft launch` (which says so in GRAPHFT_LAUNCH) starts all roles itself: ranks that happen to be in its
    environment do not count then."""
    job_dir, etcd = env.get("GRAPHFT_JOB_DIR", ""), env.get("GRAPHFT_ETCD", "")
    if env.get("GRAPHFT_ROLE"):
        kind = env["GRAPHFT_ROLE"]
        if kind not in ROLES:
            raise UsageError(f"GRAPHFT_ROLE is {kind!r}", rule="role", help=f"it is one of {', '.join(ROLES)}")
        return RoleSpec(kind, _integer(env, "GRAPHFT_INDEX", -1), job_dir, etcd)
    if env.get("RANK") and env.get("WORLD_SIZE") and not env.get("GRAPHFT_LAUNCH"):
        rank, world = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
        before = pservers + coordinator
        if world <= before:
            raise GraphftError(
                f"WORLD_SIZE is {world}, but the job has {pservers} pservers{', a coordinator' * coordinator} "
                "and needs a trainer, too",
                rule="world-size",
                help=f"start at least {before + 1} processes",
            )
        if not 0 <= rank < world:
            raise UsageError(
                f"RANK is {rank}, expected 0 to {world - 1} (WORLD_SIZE is {world})",
                rule="environment",
                help="start the processes with torchrun, which numbers them",
            )
        embed = rank == 0 and not etcd
        if rank < pservers:
            return RoleSpec("pserver", rank, job_dir, etcd, embed)
        if rank < before:
            return RoleSpec("coordinator", 0, job_dir, etcd, embed)
        return RoleSpec("trainer", rank - before, job_dir, etcd, embed)
    return None


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name) or default)
    except ValueError:
        raise UsageError(
            f"{name} is {env[name]!r}, expected a number", rule="environment", help=f"correct or unset {name}"
        ) from None


def run_as_role(job: Job, spec: RoleSpec) -> int:
    """Runs `job`, just built by the user's script, as one role of it. Returns the exit status. The first process saves
    the job where all of them find it; the others load what it saved, so that all start from the same initial values."""
    top = JOBS / job.config.name
    job_dir = Path(spec.job_dir or run_in(str(top)) or run_at(str(top), 1))
    if job.config.storage and not (job_dir / "job.json").exists() and stored_run(job.config.storage):
        fetch(job.config.storage, job_dir)
    try:
        if not (job_dir / "job.json").exists():
            job.save(job_dir)
        publish(job_dir)
    except GraphftError:
        if not (job_dir / "job.json").exists():
            raise
    check_same(read_record(job_dir), job, job_dir)
    return run_role(Job.load(job_dir), job_dir, spec)


def check_same(saved: JobRecord, job: Job, job_dir: Path) -> None:
    """Raises UsageError if this script's job is not the one that was saved. Its processes may draw initial values
    without a seed, each its own: those of the first one count."""
    if changed := differences(job_dir, saved, job, drawn(saved, job)):
        raise UsageError(
            f"{job_dir} holds another job than this script's, which differs in: {', '.join(changed)}",
            rule="job-directory",
            help="set GRAPHFT_JOB_DIR to a new folder; a script that draws initial values seeds "
            "torch first (torch.manual_seed), so that all its processes draw the same",
        )
    if differences(job_dir, saved, job):
        log.warning("this script draws initial values without a seed; those that were saved in %s are used", job_dir)


def run_role(job: Job, job_dir: Path, spec: RoleSpec, told: Callable[[Role], None] = lambda _: None) -> int:
    """Runs one role to its end; logs to stderr. Returns the exit status (see runtime/process/role_process.py). `told`:
    gets the role, once there is one."""
    follow = log_as(f"{spec.kind} {spec.index if spec.index >= 0 else f'{socket.gethostname()}:{os.getpid()}'}")
    log.info("%s%d", BEGINS, os.getpid())
    explain_on_signal()
    prepare_structs()
    try:
        with contextlib.ExitStack() as stack:
            embedded, job_dir = None, Path(job_dir).absolute()
            stack.callback(os.chdir, os.getcwd())  # `enforce` changes it
            if spec.embed_etcd and not job.config.etcd_endpoints:
                stack.enter_context(locked(job_dir))
                take_storage(job_dir)
                check_note(job_dir, Keys(job.config.name), job.run_id, None)
                embedded = start_etcd(job, job_dir)
                stack.callback(embedded.stop)
                write_endpoints(job_dir, ",".join(embedded.endpoints), own=True)
            role = _make_connected(job, job_dir, spec)
            if role is not None:
                follow(role)
                told(role)
                explain_on_signal(role.story)
                role.run()
            if embedded is not None:
                _await_others(job, embedded)
        return EXIT_OK
    except JobEnded as error:
        log.info("%s", error.message)
        return EXIT_OK
    except GraphftError as error:
        if isinstance(error, EtcdError) and is_complete(job_dir):
            log.info("the job is complete, and its etcd has ended: %s", error.message)
            return EXIT_OK
        away = error.exit_status == EXIT_LEASE_LOST  # etcd's client tells nothing more
        log.error("%s", error, exc_info=None if away else error.__cause__)
        return error.exit_status
    except KeyboardInterrupt:
        raise
    except BaseException:  # SystemExit, too, from anywhere: this role is not done
        log.exception("%s failed", spec.kind)
        return EXIT_FAILED


def _make_connected(job: Job, job_dir: Path, spec: RoleSpec) -> Role | None:
    enforce(job.config)
    endpoints, keys = spec.etcd or ",".join(job.config.etcd_endpoints or ()), Keys(job.config.name)
    etcd = connect_role(job_dir, endpoints or "")
    if endpoints:
        check_note(job_dir, keys, job.run_id, etcd)
    make_way(etcd, keys, job)
    put_job(etcd, keys, job, job_dir)
    note_etcd(job_dir, etcd)
    return make_role(job, job_dir, spec, etcd)


def make_role(job: Job, job_dir: Path, spec: RoleSpec, etcd: Store) -> Role | None:
    """Imports what the role needs in the job's mode, and no more. None: a spare pserver was not needed."""
    index = max(spec.index, 0)
    if spec.kind == "coordinator":
        from graphft.runtime.roles.coordinator.coordinator import Coordinator, TaskCoordinator

        program = job.coordinator_program()
        gives_tasks = program.find_op("serve_tasks") is not None
        return (TaskCoordinator if gives_tasks else Coordinator)(job, job_dir, program, etcd, index)
    if spec.kind == "trainer":
        program = job.trainer_program()
        if not claims_chunks(program) and job.config.trainers > 1:
            index = spec.index
        if job.config.sync:
            from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer

            return SlotTrainer(job, job_dir, etcd, index)
        from graphft.runtime.roles.trainer.chunk_trainer import ChunkTrainer, UnitTrainer

        accumulates = program.find_op("local_steps") is not None
        return (UnitTrainer if accumulates else ChunkTrainer)(job, job_dir, etcd, index)
    from graphft.runtime.roles.pserver.pserver import Pserver, claim_index

    if spec.index >= 0:
        return Pserver(job, job_dir, etcd, spec.index)
    leased = job.pserver_program(0).find_op("etcd_keep_alive") is not None
    keys, ttl = Keys(job.config.name), job.config.lease_ttl if leased else 0
    claimed = claim_index(fenced(etcd, keys, job), keys, job.config.pservers, ttl)
    return Pserver(job, job_dir, etcd, *claimed) if claimed is not None else None


def explain_on_signal(story: Callable[[], list[str]] | None = None) -> None:
    """On SIGUSR1, logs where each thread of this process is, also while the first is stuck; and its `story`."""
    if threading.current_thread() is threading.main_thread():
        faulthandler.unregister(signal.SIGUSR1)  # of an earlier call: it would take itself for registered still
        if story is None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGUSR1, lambda *_: log.warning("asked for its story:\n%s", "\n".join(story())))
        faulthandler.register(signal.SIGUSR1, file=2, chain=True)


def _await_others(job: Job, embedded: EmbeddedEtcd) -> None:
    """Returns when the others have left, which still read from etcd that the job is complete."""
    keys, end = Keys(job.config.name), time.monotonic() + LEAVE_SECONDS
    with Etcd(embedded.endpoints) as etcd:
        while time.monotonic() < end and any(map(etcd.count, (keys.pservers, keys.trainers, keys.coordinators))):
            time.sleep(0.1)
