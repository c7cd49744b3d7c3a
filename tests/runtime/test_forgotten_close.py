"""Nobody has to say goodbye: a process that just ends hangs neither itself nor anybody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, Lock, Session
from graphft.transpiler import Job
from tests.support.waiting import until

TTLS = (5, 60)
"""Seconds; the longer one for a machine so busy that the shorter one is lost meanwhile."""
FORGETFUL = """
import sys
from graphft.ops.context import ChunkWork
from graphft.runtime.etcd import Etcd, Lock, Session
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.protocol.messages import Hello
from graphft.runtime.roles.pserver.pserver import Pserver
from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer
from graphft.transpiler import Job

job, endpoints, prefix = Job.load(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
client = lambda: Etcd(endpoints, timeout=20, deadline=60)
put_job(client(), Keys(job.config.name), job)
lock = Lock(Session(client(), job.config.lease_ttl).run_thread(), prefix + "lock")
lock.acquire()
roles = [make(job, sys.argv[1], client(), 0) for make in (Pserver, SlotTrainer)]
for role in roles:
    role.session.register(role=role.kind, index=0, lease=True)
    role.start_daemon()
roles[1].transport.connect(0, "tcp://127.0.0.1:9")  # nobody is there
roles[1].transport.send(0, Hello("j", "p", "t"))
roles[1].data.read_ahead(ChunkWork(0, 0, 0, samples=1, seed=0))
print("through", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_forgets_to_close_anything_ends(
    job: Job, etcd: Etcd, keys: Keys, prefix: str, etcd_server: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Its leases end by themselves: whoever waited for what it held goes on."""
    for ttl in TTLS:
        mine, folder = Keys(f"{keys.job}-{ttl}"), tmp_path / str(ttl)
        Job(job.source, job.config.replace(name=mine.job, lease_ttl=ttl), job.programs).save(folder)
        command = [sys.executable, "-c", FORGETFUL, str(folder), ",".join(etcd_server.endpoints), prefix]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                found = process.stdout.readline(), process.wait(120)
            finally:
                process.kill()
        if found == ("through\n", 0):
            break
    assert found == ("through\n", 0)
    with Session(etcd, 60).run_thread() as session:
        Lock(session, prefix + "lock").acquire()
    until(lambda: not etcd.count(mine.pservers) + etcd.count(mine.trainers))
