"""Chunks per second through the async queue: claimed and completed by 1, 4, 16 and 64 trainers, of a pass of 100,000.

    python benchmarks/claims.py [--chunks 100000] [--seconds 5] [--trainers 1,4,16,64]

Trainers are the real ones (they claim, complete and hold leases), but compute nothing and know no shard. Beside them,
in the same run and from the same number of clients: transactions of the same shape that never meet each other.
Trainers live in up to four processes, as threads, so that a machine of few cores can hold 64 of them. The CPU time that
a chunk takes, of trainers and of etcd, does not depend on what else the machine does; the rate does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import torch

import graphft
from graphft.ops.context import NO_TERMS, EndOfPass, NoData
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.records import Generation
from graphft.runtime.coordination.run_record import put_job
from graphft.runtime.etcd import EmbeddedEtcd, Etcd, absent, mod_is, put_op
from graphft.runtime.roles.trainer.chunk_trainer import ChunkTrainer
from graphft.transpiler.job import Job

PROCESSES = 4
BARE_CHUNKS = 16
"""Chunks of one bare transaction: as many as a claim of short chunks has."""


class Rate(NamedTuple):
    """Chunks per second, and the microseconds of CPU that one takes of its trainer."""

    per_second: float
    cpu: float


def make_job(chunks: int) -> Job:
    model = torch.nn.Linear(1, 1)
    program = graphft.build(model, lambda m, x: m(x).mean(), inputs={"x": (None, 1)})
    graphft.minimize(program, graphft.SGD(lr=0.1))
    data = graphft.arrays(x=torch.zeros(chunks, 1), chunk_size=1)
    return graphft.transpile(program, data=data, batch_size=1, sync=False, ft=True, name="claims")


def claim_all(trainer: ChunkTrainer, end: float) -> int:
    """Claims and completes until the pass or the time is over; returns the number of chunks."""
    source, count = trainer.queue.records, 0
    while time.monotonic() < end:
        try:
            claims = source.take(NO_TERMS)
        except EndOfPass:
            if trainer.state.pass_index >= 0:
                break
            trainer.state.pass_index = 0
            continue
        except NoData:
            continue
        count += len(source.complete(claims))
    return count


def bare(etcd: Etcd, name: str, end: float) -> int:
    """Transactions that claim and complete keys of this client's own."""
    count = 0
    while time.monotonic() < end:
        keys = [f"/bare/{name}/{count + i}" for i in range(BARE_CHUNKS)]
        result = etcd.txn([absent(k) for k in keys], [put_op(k, b'{"attempt":1}') for k in keys])
        etcd.txn([mod_is(k, result.revision) for k in keys], [put_op(k, b"{}") for k in keys])
        count += BARE_CHUNKS
    return count


def work(
    kind: str, folder: str, endpoints: list[str], indices: list[int], seconds: float, gate: Any, found: Any
) -> None:
    """One process: its trainers, as threads that begin together."""
    job = Job.load(folder)
    clients = [Etcd(endpoints) for _ in indices]
    trainers = [ChunkTrainer(job, Path(folder), etcd, i) for i, etcd in zip(indices, clients, strict=True)]
    for trainer in trainers:
        trainer.session.register(role="trainer", index=trainer.member.index, lease=True)
        assert trainer.member.session is not None
        trainer.member.session.run_thread()
    gate.wait()
    time.sleep(0.5)  # every view has every trainer
    end, counts = time.monotonic() + seconds, [0] * len(indices)

    def run(i: int) -> None:
        counts[i] = claim_all(trainers[i], end) if kind == "claims" else bare(clients[i], trainers[i].member.id, end)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(indices))]
    started, used = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.put((sum(counts), time.monotonic() - started, time.process_time() - used))
    for trainer in trainers:
        trainer.prefetcher.close()
        trainer.close()
        trainer.transport.close()


def measure(kind: str, folder: str, endpoints: list[str], trainers: int, seconds: float) -> Rate:
    """Measures the rate of all trainers together."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    shares = [s for s in (list(range(trainers))[i::PROCESSES] for i in range(PROCESSES)) if s]
    gate, found = context.Barrier(len(shares)), context.Queue()
    processes = [context.Process(target=work, args=(kind, folder, endpoints, s, seconds, gate, found)) for s in shares]
    for process in processes:
        process.start()
    results = [found.get() for _ in processes]
    for process in processes:
        process.join()
    chunks = sum(count for count, _, _ in results)
    return Rate(chunks / max(took for _, took, _ in results), 1e6 * sum(cpu for _, _, cpu in results) / chunks)


def fresh_pass(etcd: Etcd, job: Job, folder: Path, endpoints: list[str]) -> float:
    """Makes the records of a pass of which nothing is done; returns the seconds that it took."""
    keys = Keys(job.config.name)
    for prefix in (f"/{keys.job}", "/bare/"):
        etcd.delete_prefix(prefix)
    put_job(etcd, keys, job)
    # No shard is there: what a trainer has heard of them is generation -1, and so it is recorded.
    etcd.put(keys.of_shard(0).generation, msgspec.json.encode(Generation(number=-1)))
    trainer = ChunkTrainer(job, folder, Etcd(endpoints), 0)
    trainer.state.pass_index = 0
    assert trainer.member.session is not None
    trainer.member.session.run_thread()
    started = time.monotonic()
    trainer.queue.begin_pass()
    took = time.monotonic() - started
    trainer.prefetcher.close()
    trainer.close()
    trainer.transport.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--trainers", default="1,4,16,64")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, EmbeddedEtcd(Path(scratch, "etcd")) as server:
        job, folder, endpoints = make_job(options.chunks), Path(scratch, "job"), list(server.endpoints)
        job.save(folder)
        server_process = psutil.Process(server.pid)
        with Etcd(endpoints) as etcd:
            for count in map(int, options.trainers.split(",")):
                took = fresh_pass(etcd, job, folder, endpoints)
                before = sum(server_process.cpu_times()[:2])
                queue = measure("claims", str(folder), endpoints, count, options.seconds)
                etcd_cpu = (sum(server_process.cpu_times()[:2]) - before) / (queue.per_second * options.seconds)
                plain = measure("bare", str(folder), endpoints, count, options.seconds).per_second
                print(
                    f"{count:3} trainers: {queue.per_second:7,.0f} chunks/s claimed and completed, "
                    f"{queue.per_second / plain:4.0%} of {plain:7,.0f}/s bare; CPU per chunk: {queue.cpu:.0f} us of "
                    f"trainers, {1e6 * etcd_cpu:.0f} us of etcd; {options.chunks:,} chunks enqueued in {took:.1f} s "
                    f"(load {os.getloadavg()[0]:.1f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
