"""`python -m tests.sim --seeds 1000 [--first 0]`, or `--seed 17` to replay one with its story. A seed is exact."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.sim.job import SimJob
from tests.sim.world import SimulationFailed

PROGRESS_SECONDS = 10.0
Found = tuple[int, Counter[str], str]
"""A seed, what was counted in it, and what was wrong ("": nothing)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Sync jobs under faults")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help="replay this one, and print its story")
    options = parser.parse_args()
    if options.seed is not None:
        return replay(options.seed)
    counts: Counter[str] = Counter()
    shown = time.monotonic()
    with multiprocessing.Pool(options.workers) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for done, (seed, counted, failure) in enumerate(pool.imap_unordered(run, seeds, chunksize=20)):
            if failure:
                print(f"{failure}\nreplay: python -m tests.sim --seed {seed}")
                return 1
            counts += counted
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"{done}/{len(seeds)} seeds", file=sys.stderr, flush=True)
    print(f"{len(seeds)} seeds as they should be; counted: {dict(sorted(counts.items()))}")
    return 0


def run(seed: int) -> Found:
    try:
        return seed, SimJob(seed).run().counts, ""
    except SimulationFailed as failure:
        return seed, Counter(), str(failure)


def replay(seed: int) -> int:
    try:
        job = SimJob(seed).run()
    except SimulationFailed as failure:
        print(failure)
        return 1
    print("\n".join(job.world.lines))
    print(
        f"{job.describe()}; {job.store.rollbacks} rollbacks, {job.world.now:.1f} s; "
        f"counted: {dict(sorted(job.counts.items()))}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
