"""Real roles in a simulated world, by seeds.

python -m tests.sim --mode async --seeds 1000 [--first 0]     # many; the first that fails is named
python -m tests.sim --mode async --seed 17                    # one again, with its story
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

COMMAND = "python -m tests.sim"
SHOW_SECONDS = 10.0
Task = tuple[str, str, int]
"""Scenario, mode, seed."""
Found = tuple[int, Counter[str], str]
"""A seed, what was counted in it, and what was wrong ("": nothing)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--scenario", default="faults", help="what happens: see tests/sim/scenarios.py")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help="run this one, and print its story")
    parser.add_argument("--keep-going", action="store_true", help="name every seed that fails, and go on")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names are in the same order in every process then
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    if options.seed is not None:
        return replay((options.scenario, options.mode, options.seed))
    return run_many(options)


def run_many(options: argparse.Namespace) -> int:
    began = shown = time.monotonic()
    counts: Counter[str] = Counter()
    failed = 0
    name = f"--scenario {options.scenario} --mode {options.mode}"
    tasks = [(options.scenario, options.mode, options.first + i) for i in range(options.seeds)]
    with multiprocessing.Pool(options.workers, initializer=_one_thread) as pool:
        for done, (seed, counted, wrong) in enumerate(pool.imap_unordered(_run, tasks, chunksize=5)):
            if wrong:
                failed += 1
                print(
                    "\n".join(wrong.splitlines()[-3:]), f"replay: {COMMAND} {name} --seed {seed}", sep="\n", flush=True
                )
                if not options.keep_going:
                    return 1
            counts += counted
            if time.monotonic() - shown > SHOW_SECONDS:
                shown = time.monotonic()
                print(f"{done}/{len(tasks)} seeds", file=sys.stderr, flush=True)
    rate = len(tasks) / (time.monotonic() - began)
    good = f"{len(tasks) - failed} of {len(tasks)} seeds as they should be"
    print(f"{name}: {good}, {rate:.1f} a second; {dict(sorted(counts.items()))}")
    return 1 if failed else 0


def replay(task: Task) -> int:
    from tests.sim.scenarios import simulate
    from tests.sim.world import SimulationFailed

    _one_thread()
    try:
        counts, story = simulate(*task)
    except SimulationFailed as failure:
        print(failure)
        return 1
    print(*story, f"as it should be; {dict(sorted(counts.items()))}", sep="\n")
    return 0


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _run(task: Task) -> Found:
    from tests.sim.scenarios import simulate
    from tests.sim.world import SimulationFailed

    try:
        return task[2], simulate(*task)[0], ""
    except SimulationFailed as failure:
        return task[2], Counter(), str(failure)


if __name__ == "__main__":
    sys.exit(main())
