"""From the SIGKILL of a coordinator to the first answer of the one that stood by.

    python benchmarks/takeover.py [--rounds 10] [--tasks 1000,1000000] [--ttl 2]

| told by | how the lock becomes free |
| --- | --- |
| launcher | whoever waits for the process revokes its lease at once, as a launcher does (`Revoker`) |
| lease | nobody does: the lease ends `ttl` seconds after its last renewal |

Half of the tasks of the pass are done by then: what the successor has to read. One trainer calls all the time, as a
real one does (`TaskClient`). Coordinators are forks of the job's fork server, as a launcher makes them.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

from dispatch import by_calls
from dispatch_rig import Cluster, Taker, light_job, make_job, memory

from graphft.runtime.coordination.revoker import Revoker
from graphft.runtime.engines.local import Forked
from graphft.runtime.etcd import EmbeddedEtcd

SETTLE_SECONDS = 1.0


def take_over(cluster: Cluster, taker: Taker, old: Forked, new: Forked, revoke: bool) -> float:
    """Seconds."""

    def tell() -> None:
        old.wait()
        if revoke:
            Revoker(cluster.etcd, cluster.keys).revoke(old.identity)

    teller = threading.Thread(target=tell)
    started = time.monotonic()
    os.kill(old.pid, signal.SIGKILL)
    teller.start()
    while True:
        tasks, at = taker.get(1), time.monotonic()
        serving = taker.member.view.coordinator
        if tasks:
            taker.finish(tasks)
        if serving is not None and serving.process == new.identity:
            break
    teller.join()
    return at - started


def measure(cluster: Cluster, taker: Taker, rounds: int, done: int) -> None:
    """Prints how long take-overs take, told in both ways in turn."""
    serving = cluster.start()
    cluster.await_serving(serving)
    finished = 0
    while finished < done:
        finished += by_calls(256, taker, time.monotonic() + 1.0)
    waiting, found = cluster.start(), {"launcher": [], "lease": []}  # type: ignore[var-annotated]
    before = memory(waiting.identity)
    for number in range(2 * rounds):
        time.sleep(SETTLE_SECONDS)  # it stands by
        told = ("launcher", "lease")[number % 2]
        found[told].append(take_over(cluster, taker, serving, waiting, told == "launcher"))
        if not number:
            print(f"  memory: {before:.0f} MB standing by, {memory(waiting.identity):.0f} MB serving")
        serving, waiting = waiting, cluster.start()
    for told, times in found.items():
        print(f"  told by the {told}: median {statistics.median(times):.2f} s, longest {max(times):.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tasks", default="1000,1000000")
    parser.add_argument("--ttl", type=int, default=2)
    options = parser.parse_args()
    for tasks in map(int, options.tasks.split(",")):
        with tempfile.TemporaryDirectory() as scratch, EmbeddedEtcd(Path(scratch, "etcd")) as server:
            folder, endpoints = Path(scratch, "job"), list(server.endpoints)
            job = make_job(tasks, lease_ttl=options.ttl)
            job.save(folder)
            with Cluster(job, folder, endpoints) as cluster:
                taker = Taker(light_job(job.config.name, job.run_id, tasks, lease_ttl=10), endpoints, 0)
                print(
                    f"{tasks:,} tasks, half done; leases of {options.ttl} s (load {os.getloadavg()[0]:.1f}):",
                    flush=True,
                )
                measure(cluster, taker, options.rounds, tasks // 2)
                taker.close()


if __name__ == "__main__":
    main()
