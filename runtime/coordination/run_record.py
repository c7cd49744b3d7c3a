"""The job's record in etcd: the first process of a run writes it, the others find out whether it is theirs."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.errors import UsageError
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import RunRecord
from graphft.runtime.etcd import FencedStore, LeaseLost, absent, put_op
from graphft.runtime.etcd.model import Store
from graphft.runtime.process.identity import file_namespace

if TYPE_CHECKING:
    from graphft.transpiler import Job, JobRecord


def run_record(job: Job | JobRecord, job_dir: Path | None = None) -> RunRecord:
    c, made_of = job.config, job.fingerprint
    folder, file = (str(Path(job_dir).absolute()), _file_of(job_dir)) if job_dir is not None else ("", "")
    if c.storage:  # any machine may go on with it, from a folder of its own
        folder, file = c.storage, ""
    return RunRecord(
        made_of.program,
        c.trainers,
        c.pservers,
        c.sync,
        c.ft,
        c.passes,
        c.total_steps,
        job.run_id,
        _digest(made_of.data),
        _digest(made_of.values),
        folder,
        socket.gethostname(),
        file_namespace() if not c.storage else "",
        file,
        c.dispatch,
        c.passes_on_demand,
    )


def put_job(etcd: Store, keys: Keys, job: Job | JobRecord, job_dir: Path | None = None) -> None:
    """Writes the run's record and what hangs on it, unless they are there. Raises GraphftError[foreign-job] for another
    run's."""
    spec = msgspec.json.encode(run_record(job, job_dir))
    # Of several processes that try, each finds the first one's secret: it is read from etcd, always.
    etcd.txn(
        [absent(keys.spec)],
        [
            put_op(keys.spec, spec),
            put_op(keys.run, job.run_id.encode()),
            put_op(keys.secret, secrets.token_hex(32).encode()),
            put_op(keys.ps_desired, str(job.config.pservers).encode()),
            put_op(keys.state, b"running"),
        ],
        token=keys.spec,
    )
    check_job(etcd, keys, job, job_dir)


def check_job(etcd: Store, keys: Keys, job: Job | JobRecord, job_dir: Path | None = None) -> None:
    """Raises GraphftError[foreign-job] if etcd's run of this name is another one, or `job_dir` a copy of its folder."""
    kv = etcd.get(keys.spec)
    if kv is None:
        raise LeaseLost(
            f"the record of job {keys.job} was deleted just now", rule="etcd-lease", help="start the process again"
        )
    found = msgspec.json.decode(kv.value, type=RunRecord)
    if found.run != job.run_id:
        raise UsageError(
            f"etcd has another run named {keys.job}: {describe_run(found)}; this one is {job.run_id}"
            f"{_difference(found, run_record(job))}",
            rule="foreign-job",
            help="start all roles of a run from its folder; give another run another name, or, when the other one is "
            f"not to go on, forget it: graphft forget {keys.job} --etcd HOST:PORT",
        )

    if job_dir is not None and is_copied(found, Path(job_dir)):
        raise UsageError(
            f"{job_dir} is a copy of {found.folder}, where run {found.run} was begun: its processes would write their "
            "checkpoints to two places",
            rule="foreign-job",
            help=f"start its roles from {found.folder}; if that one was moved here: graphft forget {keys.job} --etcd "
            "HOST:PORT, and it goes on from its checkpoints",
        )


def _file_of(job_dir: Path) -> str:
    """Tells the folder's job.json from a copy of it, in one namespace of files; "" if it is not there."""
    try:
        found = Path(job_dir, "job.json").stat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def is_copied(begun: RunRecord, job_dir: Path) -> bool:
    """Whether the run was begun in another folder than this one, as far as one can tell. A folder that has an etcd of
    its own may be moved with it."""
    here = file_namespace()
    known = bool(here and begun.file) and begun.place == here and not (job_dir / "etcd").is_dir()
    return known and _file_of(job_dir) not in ("", begun.file)


def describe_run(spec: RunRecord) -> str:
    """The run in words."""
    return f"{spec.run or 'unknown'}" + (f", begun in {spec.folder} on {spec.host}" if spec.folder else "")


def fenced(etcd: Store, keys: Keys, job: Job | JobRecord) -> FencedStore:
    """The store for a process of this run: what it writes holds only while etcd's run of this name is this one."""
    return FencedStore(etcd, keys.run, job.run_id.encode())


def read_secret(etcd: Store, keys: Keys) -> str:
    """What processes of the run show to its pservers."""
    kv = etcd.get(keys.secret)
    if kv is None:
        raise LeaseLost(
            f"etcd has no secret of job {keys.job}: its records were deleted",
            rule="etcd-lease",
            help="start the process again",
        )
    return kv.value.decode()


def _difference(found: RunRecord, ours: RunRecord) -> str:
    parts = {
        "program or options": found.program != ours.program,
        "data": found.data != ours.data,
        "initial values": found.values != ours.values,
    }
    named = [name for name, differs in parts.items() if differs]
    return f", and differs in {' and '.join(named)}" if named else ", of the same job"


def _digest(digests: object) -> str:
    return hashlib.blake2b(json.dumps(digests, sort_keys=True).encode(), digest_size=8).hexdigest()
