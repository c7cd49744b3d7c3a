"""What an earlier run of a job left in an etcd that outlives jobs, and in the job's folder."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from graphft.errors import GraphftError
from graphft.runtime.etcd.model import Store, delete_prefix_op, mod_is, put_op, value_is
from graphft.runtime.keys import Keys
from graphft.runtime.view import read_view

DYING_SECONDS, POLL_SECONDS = 1.0, 0.01


def forget_earlier(etcd: Store, keys: Keys, job_dir: Path, ft: bool) -> None:
    """Deletes an earlier run's records if this one cannot go on with it: it is over, or had no fault tolerance.

    Not while somebody of it lives: that run may be this one, begun on another machine. Raises GraphftError when it is
    over all the same.
    """
    kvs = etcd.range(keys.control).kvs
    view = read_view(keys, kvs)
    if ft and not view.over:
        return
    living = [m for m in (*view.pservers.values(), *view.trainers.values()) if not m.process.dead]
    if living and view.over:
        who = ", ".join(f"{m.id} on {m.host}" for m in living[:3])
        raise GraphftError(f"job {keys.job} is {view.state} already, but processes of it have not ended: {who}",
                           rule="foreign-job", help="wait for them, or give this job another name; if their machine is "
                                                    f"gone: etcdctl del --prefix /{keys.job}/")
    if living:
        return
    # At once, and only what was seen: no crash leaves half of it, and nothing of a run that began meanwhile goes.
    seen = {kv.key: kv.mod_revision for kv in kvs}
    same = [mod_is(key, seen.get(key, 0)) for key in (keys.spec, keys.state)]
    if etcd.txn(same, [delete_prefix_op(prefix) for prefix in keys.everything]).ok and not ft:
        forget_files(job_dir)


def revoke_dead(etcd: Store, keys: Keys) -> None:
    """Ends the leases of processes that are seen to be dead from here: nobody has to wait for them.

    Those of a launcher that was just killed may be dying still; so it looks for a moment.
    """
    view, end = read_view(keys, etcd.range(keys.control).kvs), time.monotonic() + DYING_SECONDS
    left = [record for record in [*view.pservers.values(), *view.trainers.values()]
            if record.process.visible and view.leases[record.id]]
    while left:
        dead = [record for record in left if record.process.dead]
        for record in dead:
            etcd.lease_revoke(view.leases[record.id])
        left = [record for record in left if record not in dead]
        if time.monotonic() > end:
            return
        time.sleep(POLL_SECONDS)


def forget_files(job_dir: Path) -> None:
    """Without fault tolerance a job cannot go on: what an earlier run left in its folder would be in the way."""
    for name in ("etcd", "checkpoints", "metrics"):
        shutil.rmtree(job_dir / name, ignore_errors=True)


def tell_failed(etcd: Store, keys: Keys) -> None:
    """Ends the job everywhere: its processes on other machines end, too."""
    etcd.txn([value_is(keys.state, b"running")], [put_op(keys.state, b"failed")], token=keys.state)
