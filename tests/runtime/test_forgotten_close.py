"""Nobody has to say goodbye: a process that just ends hangs neither itself nor anybody else."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from graphft.runtime.coordination.keys import Keys
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, Lock, Session
from graphft.transpiler import Job

TTL = 5
FORGETFUL = """
import sys
from graphft.ops.context import ChunkWork
from graphft.runtime.etcd import Etcd, Lock, Session
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.protocol.messages import Hello
from graphft.runtime.roles.pserver.round_pserver import RoundPserver
from graphft.runtime.roles.trainer.slot_trainer import SlotTrainer
from graphft.transpiler import Job

job, endpoints, prefix = Job.load(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
put_job(Etcd(endpoints), Keys(job.config.name), job)
lock = Lock(Session(Etcd(endpoints), 5).run_thread(), prefix + "lock")
lock.acquire()
roles = [make(job, sys.argv[1], Etcd(endpoints), 0) for make in (RoundPserver, SlotTrainer)]
for role in roles:
    role.session.register(role=role.kind, index=0, lease=True)
    role.start_daemon()
roles[1].transport.connect(0, "tcp://127.0.0.1:9")  # nobody is there
roles[1].transport.send(0, Hello("j", "p", "t"))
roles[1].data.read_ahead(ChunkWork(0, 0, 0, samples=1, seed=0))
print("through", flush=True)
"""


def test_a_process_that_forgets_to_close_anything_ends(
    job: Job, etcd: Etcd, keys: Keys, prefix: str, etcd_server: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Its leases end by themselves: whoever waited for what it held goes on."""
    Job(job.source, job.config.replace(name=keys.job, lease_ttl=TTL), job.programs).save(tmp_path / "job")
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path / "job"), ",".join(etcd_server.endpoints), prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "through\n"
            assert process.wait(120) == 0
        finally:
            process.kill()
    with Session(etcd, 60) as session:
        assert Lock(session, prefix + "lock").acquire(timeout=120)
    end = time.monotonic() + 60
    while etcd.count(keys.pservers) + etcd.count(keys.trainers):
        assert time.monotonic() < end, "its registrations stay"
        time.sleep(0.1)
