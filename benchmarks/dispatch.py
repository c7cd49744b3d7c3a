"""Tasks per second that trainers get and finish: from a coordinator, and as it was before, and from etcd itself.

    python benchmarks/dispatch.py [--tasks 1000000] [--seconds 8] [--rounds 3] [--trainers 1,16,64] [--json FILE]

| way | what it is | a call, or transaction |
| --- | --- | --- |
| coordinator | `dispatch="coordinator"`: group commit, a key for each 256 tasks | gets, or finishes, up to 256 tasks |
| as trainers | the same, through what async trainers use: got ahead, and told as finished, on another thread | 16 |
| direct | `dispatch="etcd"`, a pass of 100,000 chunks: each trainer claims its own (see claims.py) | about 16 chunks |
| whole state | a coordinator that writes its whole queue as one value at each change, of 10,000 tasks | 1 task |

Trainers compute nothing. They live in up to four processes, as threads. That no task is got or finished twice, and that
of a pass that is over each was finished, is checked: with the trainers' own counts, and with what etcd has.
Ways and numbers of trainers take turns; a figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import claims as direct
import numpy as np
from dispatch_rig import Cluster, Taker, light_job, make_job, memory
from queue_memory import queue_memory
from whole_state import WholeStateCluster

from graphft.ops.context import NO_TERMS, EndOfPass, NoData
from graphft.runtime.etcd import EmbeddedEtcd, Etcd
from graphft.runtime.queue.coordinator_queue import CoordinatorOpenQueue
from graphft.transpiler.job import Job

PROCESSES = 4
DIRECT_TASKS, WHOLE_TASKS = 100_000, 10_000
IDLE_SECONDS = 0.002
Drive = Callable[[Taker, float], int]


def by_calls(want: int, taker: Taker, end: float) -> int:
    """Gets and finishes until the time is over; returns the number of tasks."""
    count = 0
    while time.monotonic() < end:
        tasks = taker.get(want)
        if tasks:
            taker.finish(tasks)
        else:
            time.sleep(IDLE_SECONDS)  # others hold what is left
        count += len(tasks)
    return count


class _Pace:
    """The pace of a trainer that has tasks of no work at all."""

    pass_index, pace = 0, 1e6

    def alive_since(self, then: float) -> bool:
        return True


def as_trainers(taker: Taker, end: float) -> int:
    """The same, as async trainers do it."""
    pace, count = _Pace(), 0
    source = CoordinatorOpenQueue(taker.member, taker.client, pace, lambda: [0])  # type: ignore[arg-type]
    taker.member.watcher.wait(lambda kvs: taker.member.keys.of_shard(0).generation in kvs, 10.0)
    while time.monotonic() < end:
        try:
            claims = source.take(NO_TERMS)
        except EndOfPass:
            pace.pass_index = taker.pass_index = source.next_pass()
            continue
        except NoData:
            time.sleep(IDLE_SECONDS)
            continue
        for where in (taker.got, taker.finished):
            taker.note(where, [claim.key[1] for claim in claims])
        source.complete(claims)
        count += len(claims)
    source.release([])
    source.close()
    return count


def work(
    make: Callable[[], Job],
    endpoints: list[str],
    indices: list[int],
    drive: Drive,
    seconds: float,
    gate: Any,
    found: Any,
) -> None:
    """One process: its trainers, as threads that begin together."""
    job = make()
    takers = [Taker(job, endpoints, i) for i in indices]
    counts, gate = [0] * len(takers), gate
    gate.wait()
    time.sleep(0.5)  # the coordinator has seen every trainer
    end, started = time.monotonic() + seconds, time.monotonic()

    def run(i: int) -> None:
        counts[i] = drive(takers[i], end)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(takers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - started
    found.put((sum(counts), took, summed(t.got for t in takers), summed(t.finished for t in takers)))
    for taker in takers:
        taker.close()


def summed(counts: Any) -> dict[int, np.ndarray]:
    total: dict[int, np.ndarray] = {}
    for by_pass in counts:
        for index, array in by_pass.items():
            total[index] = total[index] + array if index in total else array
    return total


class Ledger:
    """Counts how often each task was got and finished, over all rounds with one coordinator."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        self.got: dict[int, np.ndarray] = {}
        self.finished: dict[int, np.ndarray] = {}

    def add(self, got: dict[int, np.ndarray], finished: dict[int, np.ndarray]) -> None:
        self.got, self.finished = summed([self.got, got]), summed([self.finished, finished])

    def check(self, cluster: Cluster | WholeStateCluster) -> str:
        """Raises AssertionError if a task was doubled or lost."""
        newest, told = max(self.finished), cluster.counts()
        for index, finished in self.finished.items():
            assert (self.got[index] <= 1).all(), f"tasks of pass {index} were got twice"
            assert (finished <= 1).all(), f"tasks of pass {index} were finished twice"
            if index < newest:
                assert finished.all(), f"{(finished == 0).sum()} tasks of pass {index} were never finished"
        done = told[str(newest)]["done"] if str(newest) in told else self.tasks
        assert done == int(self.finished[newest].sum()), f"etcd has {done} tasks done of pass {newest}, not those told"
        total = sum(int(f.sum()) for f in self.finished.values())
        return f"{total:,} tasks, each got and finished once ({len(self.finished) - 1} passes whole)"


def measure(
    make: Callable[[], Job], endpoints: list[str], trainers: int, drive: Drive, seconds: float, ledger: Ledger
) -> float:
    """Tasks per second of all trainers together."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    shares = [s for s in (list(range(trainers))[i::PROCESSES] for i in range(PROCESSES)) if s]
    gate, found = context.Barrier(len(shares)), context.Queue()
    processes = [context.Process(target=work, args=(make, endpoints, s, drive, seconds, gate, found)) for s in shares]
    for process in processes:
        process.start()
    results = [found.get() for _ in processes]
    for process in processes:
        process.join()
    for _, _, got, finished in results:
        ledger.add(got, finished)
    return sum(r[0] for r in results) / max(r[1] for r in results)


def measure_direct(job: Job, folder: Path, endpoints: list[str], trainers: int, seconds: float) -> float:
    """Chunks per second; what etcd has as done is what trainers have completed."""
    with Etcd(endpoints) as etcd:
        direct.fresh_pass(etcd, job, folder, endpoints)
        return direct.measure("claims", str(folder), endpoints, trainers, seconds).per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainers", default="1,16,64")
    parser.add_argument("--ways", default="coordinator,as trainers,direct,whole state")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    ways, told = options.ways.split(","), [queue_memory(options.tasks)]
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoints = {
            w: list(stack.enter_context(EmbeddedEtcd(scratch / w / "etcd")).endpoints)
            for w in ("tasks", "direct", "whole")
        }
        job = make_job(options.tasks)
        job.save(scratch / "job")
        cluster = stack.enter_context(Cluster(job, scratch / "job", endpoints["tasks"]))
        coordinator = cluster.start()
        cluster.await_serving(coordinator)
        told.append(f"coordinator, {options.tasks:,} tasks to do: {memory(coordinator.identity):.0f} MB")
        whole_job = make_job(WHOLE_TASKS, "whole")
        whole_job.save(scratch / "whole-job")
        whole = stack.enter_context(WholeStateCluster(whole_job, scratch / "whole-job", endpoints["whole"]))
        direct_job = direct.make_job(DIRECT_TASKS)
        direct_job.save(scratch / "direct-job")
        make = partial(light_job, job.config.name, job.run_id, options.tasks)
        make_whole = partial(light_job, "whole", whole_job.run_id, WHOLE_TASKS)
        ledger, whole_ledger = Ledger(options.tasks), Ledger(WHOLE_TASKS)
        seconds = options.seconds
        runs: dict[str, Callable[[int], float]] = {
            "coordinator": lambda n: measure(make, endpoints["tasks"], n, partial(by_calls, 256), seconds, ledger),
            "as trainers": lambda n: measure(make, endpoints["tasks"], n, as_trainers, seconds, ledger),
            "direct": lambda n: measure_direct(direct_job, scratch / "direct-job", endpoints["direct"], n, seconds),
            "whole state": lambda n: measure(
                make_whole, endpoints["whole"], n, partial(by_calls, 1), seconds, whole_ledger
            ),
        }
        for number in range(options.rounds):
            for count in map(int, options.trainers.split(",")):
                for way in ways:
                    rates[way, count].append(runs[way](count))
                    found, load = rates[way, count][-1], os.getloadavg()[0]
                    print(
                        f"round {number}, {count:2} trainers, {way}: {found:,.0f} tasks/s (load {load:.1f})", flush=True
                    )
        told.append(f"coordinator, after all that: {memory(coordinator.identity):.0f} MB")
        if ledger.finished:
            told.append("coordinator: " + ledger.check(cluster))
        if whole_ledger.finished:
            told.append("whole state: " + whole_ledger.check(whole))
    medians = {key: statistics.median(values) for key, values in rates.items()}
    print(table(medians, ways, [int(n) for n in options.trainers.split(",")]))
    print("\n".join(told))
    if options.json:
        options.json.write_text(json.dumps({f"{w} {n}": values for (w, n), values in rates.items()}))


def table(medians: dict[tuple[str, int], float], ways: list[str], trainers: list[int]) -> str:
    rows = ["", "| trainers | " + " | ".join(ways) + " |", "| --- |" + " --- |" * len(ways)]
    for count in trainers:
        first = medians[ways[0], count]
        cells = [
            f"{medians[w, count]:,.0f}" + (f" (1/{first / medians[w, count]:.1f})" if w != ways[0] else "")
            for w in ways
        ]
        rows.append(f"| {count} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
