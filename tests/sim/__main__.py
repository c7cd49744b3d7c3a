"""`python -m tests.sim --seeds 1000 [--first 0]`, or `--seed 17` to replay one with its story. A seed is exact."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.job import SimJob
from tests.sim.world import SimulationFailed

PROGRESS_SECONDS = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Sync jobs under faults")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replay this one, and print its story")
    parser.add_argument("--flaky", type=float, default=0.0, metavar="SHARE",
                        help="of the batches that fail now and then, until they are discarded (default: 0)")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    counts: Counter[str] = Counter()
    shown = time.monotonic()
    for done, seed in enumerate(seeds):
        if time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"{done}/{len(seeds)} seeds", file=sys.stderr, flush=True)
        try:
            job = SimJob(seed, flaky=options.flaky).run()
        except SimulationFailed as failure:
            print(failure)
            print(f"replay: python -m tests.sim --flaky {options.flaky} --seed {seed}")
            return 1
        counts += job.counts
        if options.seed is not None:
            print("\n".join(job.world.lines))
            print(f"{job.describe()}; {job.store.rollbacks} rollbacks, {job.world.now:.1f} s")
    print(f"{len(seeds)} seeds as they should be; counted: {dict(sorted(counts.items()))}")
    return 0


sys.exit(main())
