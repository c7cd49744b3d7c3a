"""Measures the cost of looking at loss and gradients:
`python benchmarks/nonfinite.py [--pairs 4] [--seconds 10] [--job NAME]`.

First the check by itself: a bucket of 4 MB is packed, as a trainer does it, with and without a look at its values; and
for each job the CPU time of all looks of a step, beside that of computing the step (both by one thread's clock, which
other load hardly disturbs).

Then whole jobs, unless --pairs is 0: with on_nonfinite="stop" (the default) and "warn" (nothing is looked at but the
loss) in turn, as in ft_overhead.py: the median, over the pairs of runs, of the ratio of their times per step, and of
their trainers' CPU seconds per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ft_overhead import JOBS, Measured, Run

from graphft.runtime.data import open_reader
from graphft.runtime.execute.finite import is_finite
from graphft.runtime.replay.command import LocalShards, LocalTrainer
from graphft.runtime.transport.buffers import BucketBuffers, as_tensor

ELEMENTS, ROUNDS, STEPS = 1 << 20, 200, 30


def bucket_seconds() -> tuple[float, float]:
    """The median seconds that packing a bucket takes, and looking at what was packed. One thread, as in a role."""
    torch.set_num_threads(1)
    gradients = [torch.randn(ELEMENTS // 8) for _ in range(8)]
    buffers, packing, looking = BucketBuffers(gradients, [(0, ELEMENTS // 8)] * 8), [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        frame = buffers.pack(gradients)
        packed = time.perf_counter()
        assert is_finite(as_tensor(frame, torch.float32))
        looking.append(time.perf_counter() - packed)
        packing.append(packed - start)
    return statistics.median(packing), statistics.median(looking)


def step_seconds(name: str) -> tuple[float, float]:
    """CPU seconds, of one slot: computing a step, and looking at its loss and gradients."""
    job = JOBS[name](ft=True)
    with tempfile.TemporaryDirectory() as folder:
        job.save(folder)  # its data
        shards = LocalShards(job)
        trainer = LocalTrainer(job, open_reader(job.config.data, folder, 0), shards)
        pushed = [t for t in trainer.compute(0, 0).pushed.values() if t.is_floating_point()]
        computing = [_cpu(lambda: trainer.compute(0, 0)) for _ in range(STEPS)]
    looking = [_cpu(lambda: [is_finite(torch.ones(())), *map(is_finite, pushed)]) for _ in range(ROUNDS)]
    return statistics.median(computing), statistics.median(looking)


def _cpu(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def compare(name: str, pairs: int, seconds: float) -> tuple[list[Measured], list[Measured]]:
    """The runs with and without the check, in the order of their pairs."""
    found: dict[str, list[Measured]] = {"stop": [], "warn": []}
    for i in range(pairs):
        for choice in sorted(found, reverse=bool(i % 2)):
            with tempfile.TemporaryDirectory() as folder:
                job = JOBS[name](ft=True, on_nonfinite=choice)
                found[choice].append(Run(job, Path(folder) / "job").measure(seconds))
    return found["stop"], found["warn"]


def tell(name: str, checked: list[Measured], unchecked: list[Measured]) -> None:
    times = sorted(c.step / u.step for c, u in zip(checked, unchecked, strict=True))
    cpu = sorted(c.cpu["trainer"] / u.cpu["trainer"] for c, u in zip(checked, unchecked, strict=True))
    step = 1e3 * statistics.median(m.step for m in unchecked)
    print(
        f"{name:11} {step:>8.2f} ms {statistics.median(times):>10.3f} {times[0]:>7.3f} -{times[-1]:>6.3f} "
        f"{statistics.median(cpu):>8.3f} {cpu[0]:>7.3f} -{cpu[-1]:>6.3f}   {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="runs with and without, each (default 4)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which each is measured (default 10)")
    parser.add_argument("--job", choices=JOBS, action="append", help="only this one (may be repeated)")
    options = parser.parse_args()
    packing, looking = bucket_seconds()
    print(f"a bucket of 4 MB: packed in {1e6 * packing:.0f} us, looked at in {1e6 * looking:.0f} us")
    for name in options.job or JOBS:
        step, looks = step_seconds(name)
        print(f"{name:11} computes a step in {1e3 * step:.2f} ms, looks at it in {1e6 * looks:.0f} us", flush=True)
    if not options.pairs:
        return
    print(f"{'job':11} {'unchecked':>11} {'step time':>10} {'from - to':>16} {'CPU':>8} {'from - to':>16}   load")
    for name in options.job or JOBS:
        tell(name, *compare(name, options.pairs, options.seconds))


if __name__ == "__main__":
    main()
