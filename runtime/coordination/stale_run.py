"""What an earlier run of a job left in an etcd that outlives jobs, and in the job's folder."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.disk.fileio import remove_folder
from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Failure, Registration, RunRecord
from graphft.runtime.coordination.revoker import leases_of_processes
from graphft.runtime.coordination.run_record import describe_run
from graphft.runtime.coordination.status import list_jobs
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.etcd.embedded import HOST
from graphft.runtime.etcd.model import KV, Store, delete_op, delete_prefix_op, mod_is, put_op, value_is
from graphft.runtime.process.identity import file_namespace

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobRecord

log = logging.getLogger("graphft")

DYING_SECONDS, POLL_SECONDS = 1.0, 0.01


def make_way(etcd: Store, keys: Keys, job: Job | JobRecord) -> None:
    """Deletes the records of another run of this name, if that run will not go on: it is over, or it was abandoned, for
    its folder is gone or holds another run. Raises GraphftError[foreign-job] if it may go on."""
    kvs = etcd.range(keys.control).kvs
    spec = _spec_of(keys, kvs)
    if spec is None or spec.run == job.run_id:
        return
    view = read_view(keys, kvs)
    living = _living(view)
    if living:
        raise _in_the_way(
            keys,
            spec,
            "processes of it live: " + ", ".join(f"{m.id} on {m.host}" for m in living[:3]),
            "wait for their end, or give this job another name",
        )
    if not view.over and spec.ft and not _abandoned(spec):
        raise _in_the_way(
            keys,
            spec,
            "it is unfinished",
            f"go on with it (graphft launch --job {spec.folder or 'ITS-FOLDER'}), give this job another "
            f"name, or have it forgotten: graphft forget {keys.job} --etcd HOST:PORT",
        )
    log.info(
        "etcd had another run of job %s, which is %s: its records are deleted (%s)",
        keys.job,
        view.state if view.over else "abandoned",
        describe_run(spec),
    )
    forget(etcd, keys, kvs)


def begin_anew(etcd: Store, keys: Keys, job: Job | JobRecord, job_dir: Path) -> bool:
    """Deletes what this very run left, if it cannot go on with it: it is over although its model is gone, or has no
    fault tolerance. Not while a process of it lives, which may be on another machine. Returns whether it was complete:
    then its model is made again."""
    kvs = etcd.range(keys.control).kvs
    spec, view = _spec_of(keys, kvs), read_view(keys, kvs)
    if spec is None or spec.run != job.run_id or (job.config.ft and not view.over):
        return False
    living = _living(view)
    if living and view.over:
        raise _in_the_way(
            keys,
            spec,
            f"it is {view.state} already, but processes of it have not ended: "
            + ", ".join(f"{m.id} on {m.host}" for m in living[:3]),
            "wait for them, or give this job another name",
        )
    if living or not forget(etcd, keys, kvs):
        return False
    if not job.config.ft:
        forget_files(job_dir)
    return view.state == "complete"


def forget(etcd: Store, keys: Keys, kvs: Sequence[KV]) -> bool:
    """Deletes all records of a run at once, and only what was seen: no crash leaves half of them, and nothing of a run
    that began meanwhile goes. Returns whether it did. `kvs`: the control records, as read."""
    seen = {kv.key: kv.mod_revision for kv in kvs}
    same = [mod_is(key, seen.get(key, 0)) for key in (keys.spec, keys.state)]
    return etcd.txn(same, [delete_prefix_op(prefix) for prefix in keys.everything]).ok


def forget_dead(etcd: Store, keys: Keys, force: bool = False) -> RunRecord:
    """`graphft forget`: deletes the records of a run whose processes are dead. Its folder stays.

    Raises GraphftError when there is no such run, or (unless `force`) a process of it may live: a run without fault
    tolerance leaves registrations that no lease takes away, and from here its processes may not be seen.
    """
    kvs = etcd.range(keys.control).kvs
    spec, view = _spec_of(keys, kvs), read_view(keys, kvs)
    if spec is None:
        raise GraphftError(
            f"etcd knows no job named {keys.job}",
            rule="unknown-job",
            help=f"jobs that it knows: {', '.join(list_jobs(etcd)) or 'none'}",
        )
    members = _living(view)
    if members and not force:
        raise _in_the_way(
            keys,
            spec,
            "processes of it are registered: " + ", ".join(f"{m.id} on {m.host}" for m in members[:3]),
            "end them first; if they are known to be dead: graphft forget --force",
        )
    if not forget(etcd, keys, kvs):
        raise _in_the_way(keys, spec, "it went on meanwhile", "end it first")
    return spec


def _living(view: JobView) -> list[Registration]:
    """Registered processes that are not known to be dead."""
    return [m for m in view.registrations if not m.process.dead]


def _spec_of(keys: Keys, kvs: Sequence[KV]) -> RunRecord | None:
    found = next((kv for kv in kvs if kv.key == keys.spec), None)
    return msgspec.json.decode(found.value, type=RunRecord) if found is not None else None


def _in_the_way(keys: Keys, spec: RunRecord, why: str, help: str) -> GraphftError:
    return UsageError(
        f"etcd has another run named {keys.job} ({describe_run(spec)}), and {why}", rule="foreign-job", help=help
    )


def _abandoned(spec: RunRecord) -> bool:
    """Whether the run's folder is known to be gone, or to hold another run: then no one can go on with it.

    That can be known only where the same path means the same folder: on this machine since its start, in this namespace
    of mounts. Where the folder above is gone as well, a mount may be away.
    """
    from graphft.transpiler import read_record

    here = file_namespace()
    if not spec.folder or not here or spec.place != here or not Path(spec.folder).parent.is_dir():
        return False
    try:
        return not Path(spec.folder, "job.json").exists() or read_record(Path(spec.folder)).run_id != spec.run
    except (OSError, GraphftError):
        return False  # it is there, and cannot be read now


def revoke_dead(etcd: Store, keys: Keys) -> None:
    """Ends the leases of processes that are seen to be dead from here, so that no process waits for them.

    Those of a launcher that was just killed may be dying still; so it looks for a moment.
    """
    end = time.monotonic() + DYING_SECONDS
    left = [(process, lease) for process, lease in leases_of_processes(etcd, keys) if process.visible]
    while left:
        dead = [(process, lease) for process, lease in left if process.dead]
        for _, lease in dead:
            etcd.lease_revoke(lease)
        left = [each for each in left if each not in dead]
        if time.monotonic() > end:
            return
        time.sleep(POLL_SECONDS)


def forget_files(job_dir: Path) -> None:
    """Without fault tolerance a job cannot go on: what an earlier run left in its folder would be in the way."""
    for name in ("etcd", "checkpoints"):
        shutil.rmtree(job_dir / name, ignore_errors=True)
    for name in ("metrics.rows", "ends.jsonl", "time.json"):
        (job_dir / name).unlink(missing_ok=True)


def forget_own_etcd(job_dir: Path) -> None:
    """Deletes the data of the etcd that comes with the job: it goes on from the newest checkpoint in its folder. All of
    them: what is left of an etcd answers with what it knew, and takes nothing. Raises GraphftError[etcd-data]."""
    try:
        remove_folder(job_dir / "etcd")
    except OSError as error:
        raise GraphftError(
            f"what etcd knows of the run cannot be deleted: {error}",
            rule="etcd-data",
            help=f"nothing was changed: see to {job_dir / 'etcd'}, and call it again",
        ) from error


def tell_failed(etcd: Store, keys: Keys, failure: Failure | None = None) -> None:
    """Ends the job everywhere: its processes on other machines end, too. The first reason stays."""
    why = [put_op(keys.failure, msgspec.json.encode(failure))] if failure is not None else []
    etcd.txn([value_is(keys.state, b"running")], [put_op(keys.state, b"failed"), *why], token=keys.state)


def try_again(etcd: Store, keys: Keys, job: Job | JobRecord) -> str:
    """Lets this very run go on, that has failed, from its newest checkpoint. A fault of the machine does not come
    again; anything else fails again, with the same reason. Returns the reason of the last time; "" if there was none.
    """
    kvs = etcd.range(keys.control).kvs
    spec, view = _spec_of(keys, kvs), read_view(keys, kvs)
    if spec is None or spec.run != job.run_id or not job.config.ft or view.state != "failed" or _living(view):
        return ""
    again = [put_op(keys.state, b"running"), delete_op(keys.failure)]
    etcd.txn([value_is(keys.state, b"failed")], again, token=keys.state)
    return view.failure.reason if view.failure is not None else "no reason was recorded"


def start_etcd(job: Job | JobRecord, job_dir: Path, data: str = "", host: str = "") -> EmbeddedEtcd:
    """Returns the running server, with what an earlier run of the job left in `data` (by default in the job's folder),
    as far as the job can go on from it. `host`: the address of this machine at which other machines reach it."""
    if not job.config.ft:
        forget_files(job_dir)
    server = EmbeddedEtcd(data or job_dir / "etcd", host=host or HOST).start()
    try:
        with Etcd(server.endpoints) as etcd:
            revoke_dead(etcd, Keys(job.config.name))
    except BaseException:
        server.stop()
        raise
    return server
