"""Keeps the run's records in etcd: its first process writes them, the others find out whether they are theirs, and what
an earlier run left there ends."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Failure, Registration, RunRecord, decode
from graphft.runtime.coordination.revoker import revoke_dead
from graphft.runtime.coordination.status import unknown_job
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, EtcdError, FencedStore, LeaseLost
from graphft.runtime.etcd.embedded import HOST
from graphft.runtime.etcd.model import KV, Store, absent, delete_op, delete_prefix_op, mod_is, put_op, value_is
from graphft.runtime.transport.channel import Login
from graphft.transpiler.record import RECORD

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig
    from graphft.transpiler.job import Job
    from graphft.transpiler.record import JobRecord

log = logging.getLogger("graphft")


# -- the run that is at work ------------------------------------------------------------------------------------------


def put_job(etcd: Store, keys: Keys, job: Job | JobRecord, job_dir: Path | None = None) -> None:
    """Writes the run's record, unless it is there. Raises GraphftError[foreign-job] if etcd's run of
    this name is another one, or `job_dir` a copy of its folder."""
    c = job.config
    folder = c.storage or (str(Path(job_dir).absolute()) if job_dir is not None else "")
    record = RunRecord(
        c.trainers,
        c.pservers,
        c.sync,
        c.ft,
        c.epochs,
        c.total_steps,
        job.run_id,
        folder,
        socket.gethostname(),
        c.dispatch,
        c.passes_on_demand,
    )
    etcd.txn(
        [absent(keys.spec)],
        [
            put_op(keys.spec, msgspec.json.encode(record)),
            put_op(keys.run, job.run_id.encode()),
            put_op(keys.ps_desired, str(c.pservers).encode()),
            put_op(keys.state, b"running"),
        ],
        token=keys.spec,
    )
    found = decode(etcd.get(keys.spec), RunRecord)
    if found is None:
        raise LeaseLost(
            f"the record of job {keys.job} was deleted just now", rule="etcd-lease", help="start the process again"
        )
    if found.run != job.run_id:
        raise UsageError(
            f"etcd has another run named {keys.job}: {describe_run(found)}; this one is {job.run_id}",
            rule="foreign-job",
            help="start all roles of a run from its folder; give another run another name, or, when the other one is "
            f"not to go on, forget it: graphft forget {keys.job} --etcd HOST:PORT",
        )
    if job_dir is not None and _is_copy(found, Path(job_dir)):
        raise UsageError(
            f"{job_dir} is a copy of {found.folder}, where run {found.run} was begun: its processes would write their "
            "checkpoints to two places",
            rule="foreign-job",
            help=f"start its roles from {found.folder}, or delete that one",
        )


def _is_copy(begun: RunRecord, job_dir: Path) -> bool:
    """True if the run's first folder is another one, and still there. A folder with an etcd of its own is a run by
    itself."""
    if not begun.folder or (job_dir / "etcd").is_dir():
        return False
    try:
        return not Path(begun.folder, RECORD).samefile(job_dir / RECORD)
    except OSError:
        return False


def describe_run(record: RunRecord) -> str:
    return record.run + (f", begun in {record.folder} on {record.host}" if record.folder else "")


def fenced(etcd: Store, keys: Keys, job: Job | JobRecord) -> FencedStore:
    """Returns the store for a process of this run: its writes hold only while etcd's run of this name is this one."""
    return FencedStore(etcd, keys.run, job.run_id.encode())


@contextlib.contextmanager
def guest_login(etcd: Store, keys: Keys) -> Iterator[Login]:
    """Lets this process, which is no member of the job, talk to its servers for a while. Raises EtcdError."""
    login = Login()
    guest = keys.guests + login.keys.public
    etcd.put(guest, b"")
    try:
        yield login
    finally:
        with contextlib.suppress(EtcdError):
            etcd.delete(guest)


def tell_failed(etcd: Store, keys: Keys, failure: Failure | None = None) -> None:
    """Ends the job everywhere. The first reason stays."""
    why = [put_op(keys.failure, msgspec.json.encode(failure))] if failure is not None else []
    etcd.txn([value_is(keys.state, b"running")], [put_op(keys.state, b"failed"), *why], token=keys.state)


def check_asked_for(config: JobConfig, job: object, instead: str) -> None:
    """Raises UsageError for a job that would wait for ever without the script that asks for its epochs."""
    if config.passes_on_demand:
        raise UsageError(
            f"{job} is the job of a graphft.Trainer: its script asks for the epochs, one by one",
            rule="on-demand",
            help=instead,
        )


class WantedPasses:
    """Keeps how many passes are wanted so far, of a job whose passes are on demand: trainers begin no others. One
    launch's record, in which it only grows."""

    def __init__(self, etcd: Store, keys: Keys, count: int) -> None:
        self.etcd, self.keys, self.count = etcd, keys, count

    def begin(self) -> None:
        """Replaces the record of an earlier launch. Raises EtcdError."""
        self.etcd.put(self.keys.wanted_passes, str(self.count).encode())

    def want(self, count: int) -> None:
        """Passes before `count` may begin from now on. Raises EtcdError: `keep` tries again."""
        self.count = max(self.count, count)
        kv = self.etcd.get(self.keys.wanted_passes)
        if kv is None or int(kv.value) < self.count:
            self.begin()

    def keep(self) -> None:
        """Writes it again if etcd has lost its data."""
        with contextlib.suppress(EtcdError):
            self.want(self.count)


# -- runs before it ---------------------------------------------------------------------------------------------------


def make_way(etcd: Store, keys: Keys, job: Job | JobRecord) -> None:
    """Deletes the records of another run of this name that is over. Raises GraphftError[foreign-job] if it may go
    on."""
    kvs = etcd.range(keys.control).kvs
    record, view = _read(keys, kvs)
    if record is None or record.run == job.run_id:
        return
    if members := _living(view):
        raise _in_the_way(
            keys, record, f"processes of it live: {members}", "wait for their end, or give this job another name"
        )
    if not view.over and record.ft:
        raise _in_the_way(
            keys,
            record,
            "it is unfinished",
            f"go on with it (graphft launch --job {record.folder or 'ITS-FOLDER'}), give this job another "
            f"name, or have it forgotten: graphft forget {keys.job} --etcd HOST:PORT",
        )
    log.info("etcd had another run of job %s, %s: its records are deleted", keys.job, describe_run(record))
    _forget(etcd, keys, kvs)


def begin_anew(etcd: Store, keys: Keys, job: Job | JobRecord, job_dir: Path) -> None:
    """Deletes the records of this very run, if it has no fault tolerance and no process of it lives. Raises
    UsageError[job-complete] if it is complete, and its model is gone."""
    kvs = etcd.range(keys.control).kvs
    record, view = _read(keys, kvs)
    if record is None or record.run != job.run_id:
        return
    if job.config.ft and view.state == "complete":
        raise UsageError(
            f"{job_dir} is complete, and its model is gone",
            rule="job-complete",
            help=f"graphft checkpoint export {job_dir} FILE --version STEP writes it again; --fresh trains again",
        )
    if not job.config.ft and not _living(view) and _forget(etcd, keys, kvs):
        _forget_files(job_dir)


def try_again(etcd: Store, keys: Keys, job: Job | JobRecord) -> str:
    """Lets this very run go on, that has failed, from its newest checkpoint: a fault of the machine does not come
    again. Returns the reason of the last time; "" if there was none."""
    record, view = _read(keys, etcd.range(keys.control).kvs)
    if record is None or record.run != job.run_id or not job.config.ft or view.state != "failed" or _living(view):
        return ""
    again = [put_op(keys.state, b"running"), delete_op(keys.failure)]
    etcd.txn([value_is(keys.state, b"failed")], again, token=keys.state)
    return view.failure.reason if view.failure is not None else "no reason was recorded"


def forget_dead(etcd: Store, keys: Keys, force: bool = False) -> RunRecord:
    """Deletes the records of a run whose processes are dead (`graphft forget`). Raises GraphftError when there is no
    such run, or (unless `force`) a process of it may live."""
    kvs = etcd.range(keys.control).kvs
    record, view = _read(keys, kvs)
    if record is None:
        raise unknown_job(etcd, keys)
    if (members := _living(view)) and not force:
        help = "end them first; if they are known to be dead: graphft forget --force"
        raise _in_the_way(keys, record, f"processes of it are registered: {members}", help)
    if not _forget(etcd, keys, kvs):
        raise _in_the_way(keys, record, "it went on meanwhile", "end it first")
    return record


def start_etcd(job: Job | JobRecord, job_dir: Path, data: str = "", host: str = "") -> EmbeddedEtcd:
    """Returns the running server, with the records of an earlier launch in `data` (by default in the job's folder).
    `host`: the address at which other machines reach it."""
    if not job.config.ft:
        _forget_files(job_dir)
    server = EmbeddedEtcd(data or job_dir / "etcd", host=host or HOST).start()
    try:
        with Etcd(server.endpoints) as etcd:
            revoke_dead(etcd, Keys(job.config.name))
    except BaseException:
        server.stop()
        raise
    return server


def _read(keys: Keys, kvs: Sequence[KV]) -> tuple[RunRecord | None, JobView]:
    return decode(next((kv for kv in kvs if kv.key == keys.spec), None), RunRecord), read_view(keys, kvs)


def _forget(etcd: Store, keys: Keys, kvs: Sequence[KV]) -> bool:
    """Deletes all records of a run at once, and only those that were seen (`kvs`): nothing of a run that began
    meanwhile goes. Returns True if it did."""
    seen = {kv.key: kv.mod_revision for kv in kvs}
    same = [mod_is(key, seen.get(key, 0)) for key in (keys.spec, keys.state)]
    return etcd.txn(same, [delete_prefix_op(prefix) for prefix in keys.everything]).ok


def _forget_files(job_dir: Path) -> None:
    """Without fault tolerance a job cannot go on: the files of an earlier launch would be in the way."""
    for name in ("etcd", "checkpoints"):
        shutil.rmtree(job_dir / name, ignore_errors=True)
    for name in ("metrics.rows", "ends.jsonl", "time.json"):
        (job_dir / name).unlink(missing_ok=True)


def _living(view: JobView) -> str:
    members: list[Registration] = [m for m in view.registrations if not m.process.dead]
    return ", ".join(f"{m.id} on {m.host}" for m in members[:3])


def _in_the_way(keys: Keys, record: RunRecord, why: str, help: str) -> GraphftError:
    return UsageError(
        f"etcd has another run named {keys.job} ({describe_run(record)}), and {why}", rule="foreign-job", help=help
    )
