"""Real roles in a simulated world, by seeds.

python -m tests.sim --mode async --seeds 1000 [--first 0]     # many; those that fail are named
python -m tests.sim --mode async --seed 17                    # one again, with its story
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

COMMAND = "python -m tests.sim"


class Task(NamedTuple):
    scenario: str
    mode: str
    seed: int
    dispatch: str


class Found(NamedTuple):
    """`wrong`: the end of the story of a seed that failed; "" of one that did not. `digest`: of its story."""

    task: Task
    counts: Counter[str]
    wrong: str
    digest: str


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--dispatch", choices=("etcd", "coordinator"), default="etcd", help="who gives out the chunks")
    parser.add_argument(
        "--scenario", nargs="+", default=["faults"], help="NAME, NAME=SEEDS or NAME=SEEDS@FIRST, see scenarios.py"
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run of each scenario")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help="run this one, and print its story")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and compare their stories")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names are in the same order in every process then
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])
    if options.seed is not None:
        return replay(Task(options.scenario[0], options.mode, options.seed, options.dispatch))
    _prepare()
    with multiprocessing.Pool(options.workers) as pool:
        return max(run_many(pool, scenario, options) for scenario in options.scenario)


def run_many(pool: multiprocessing.pool.Pool, scenario: str, options: argparse.Namespace) -> int:
    began, failed, counts = time.monotonic(), 0, Counter[str]()
    scenario, _, seeds_of = scenario.partition("=")
    count, _, its_first = seeds_of.partition("@")
    first = int(its_first or options.first)
    name = f"--scenario {scenario} --mode {options.mode}"
    if options.dispatch != "etcd":
        name += f" --dispatch {options.dispatch}"
    seeds = range(first, first + int(count or options.seeds))
    tasks = [Task(scenario, options.mode, seed, options.dispatch) for seed in seeds] * (2 if options.twice else 1)
    digests: dict[Task, str] = {}
    for found in pool.imap_unordered(_run, tasks):
        differs = digests.setdefault(found.task, found.digest) != found.digest
        wrong = found.wrong or ("its story is another one in another process" if differs else "")
        if wrong:
            failed += 1
            print(*wrong.splitlines()[-3:], f"replay: {COMMAND} {name} --seed {found.task.seed}", sep="\n", flush=True)
        counts += found.counts
    rate = len(tasks) / (time.monotonic() - began)
    good = f"{len(tasks) - failed} of {len(tasks)} seeds as they should be"
    begins = f" --first {its_first}" if its_first else ""
    print(f"{name}{begins}: {good}, {rate:.1f} a second; {dict(sorted(counts.items()))}", flush=True)
    return min(failed, 1)


def replay(task: Task) -> int:
    from tests.sim.scenarios import simulate
    from tests.sim.world import SimulationFailed

    _prepare()
    try:
        counts, story = simulate(*task)
    except SimulationFailed as failure:
        print(failure)
        return 1
    print(*story, f"as it should be; {dict(sorted(counts.items()))}", sep="\n")
    return 0


def _prepare() -> None:
    """Imports what every worker needs, before they are forked; the bits are those of one thread."""
    import torch

    import tests.sim.scenarios  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def _run(task: Task) -> Found:
    from tests.sim.scenarios import simulate
    from tests.sim.world import SimulationFailed

    try:
        counts, story = simulate(*task)
    except SimulationFailed as failure:
        return Found(task, Counter(), str(failure), _digest(str(failure).splitlines()))
    return Found(task, counts, "", _digest(story))


def _digest(story: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(story).encode(), digest_size=16).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
