"""`make chaos`: several jobs, each under its own schedule of faults. Takes a while.

Sync jobs must end with the bits of their undisturbed runs; async ones, after each batch was applied once on each shard.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from graphft.runtime.chaos.experiment import prepare, run_chaos, save_script
from graphft.runtime.chaos.faults import COORDINATOR_WEIGHTS
from graphft.runtime.chaos.run import ChaosOptions, Report, recovery_table

WIDTH = 120
PATIENCE = 300.0


@dataclass(frozen=True)
class Plan:
    """One run."""

    name: str
    group: str
    script: tuple[str, ...]
    faults: int
    kinds: tuple[str, ...] = ()

    def options(self, seed: int, share: float) -> ChaosOptions:
        return ChaosOptions(max(1, round(self.faults * share)), seed, self.kinds, PATIENCE)


FLIGHTS = ("examples/03_flights.py", "--small", "--kill-at", "0", "--passes")
DIGITS = ("examples/02_digits.py", "--passes")


def many_tasks(**options: object) -> tuple[str, ...]:
    """A job of very many small chunks, of two batches each: whoever gives them out has something to do."""
    usual = {"trainers": 2, "dispatch": "coordinator", "chunk_size": 16, "checkpoint_every": 100}
    return "tests/integration/script.py", "", json.dumps({**usual, "blobs": {"records": 1600}, **options})


COORDINATED = (*COORDINATOR_WEIGHTS, "kill-etcd", "kill-trainer", "kill-pserver", "pause-trainer", "kill-job")
"""These include the faults of other processes that may come between a coordinator and its queue."""
PLANS = (
    Plan("flights", "sync", (*FLIGHTS, "80"), 65),
    Plan("digits", "sync", (*DIGITS, "100"), 65),
    Plan("gpt", "sync", ("examples/04_tiny_gpt.py", "--small", "--passes", "30"), 50),
    Plan("async-flights", "async", (*FLIGHTS, "90", "--mode", "async"), 80),
    Plan("async-digits", "async", (*DIGITS, "110", "--mode", "async"), 80),
    Plan("coordinator-sync", "coordinator", many_tasks(epochs=100), 160, COORDINATED),
    Plan("coordinator-async", "coordinator", many_tasks(epochs=80, sync=False), 160, COORDINATED),
    Plan("dc-asgd", "modes", (*DIGITS, "40", "--mode", "dc_asgd"), 20),
    Plan("half-async", "modes", (*FLIGHTS, "60", "--mode", "half_async"), 20),
    Plan("geo-sgd", "modes", (*DIGITS, "60", "--mode", "geo_sgd"), 20),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the schedules (default: the time)")
    parser.add_argument("--share", type=float, default=1.0, help="of the faults of each run (default: 1)")
    names = ", ".join(dict.fromkeys([p.group for p in PLANS] + [p.name for p in PLANS]))
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME[,NAME...]",
        help=f"run only the plans, or groups of plans, of these names: {names}",
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    plans = [p for p in PLANS if not only or p.name in only or p.group in only]
    if not plans:
        parser.error(f"there is no plan {options.only!r}")
    console, work = Console(highlight=False, markup=False, emoji=False, width=WIDTH), options.out / "chaos"
    shutil.rmtree(work, ignore_errors=True)
    started, reports = time.monotonic(), dict[str, Report]()
    for number, plan in enumerate(plans):
        console.print(f"===== {plan.name}: {' '.join(plan.script)}, seed {options.seed + number}")
        folder = work / plan.name
        save_script(plan.script[0], plan.script[1:], folder / "job")
        prepared = prepare(folder / "job", folder, PATIENCE)
        report = run_chaos(prepared, plan.options(options.seed + number, options.share), console.print)
        console.print(report.render())
        reports[plan.name] = report
    _summary(reports, console)
    ok, seconds = all(r.ok for r in reports.values()), time.monotonic() - started
    console.print(f"{seconds:.0f} s; the runs are in {work}")
    return 0 if ok else 1


def _summary(reports: dict[str, Report], console: Console) -> None:
    table = Table(title="all runs", title_justify="left")
    for column in ("run", "faults", "steps", "again", "generations", "seconds", "completed", "kept"):
        table.add_column(column)
    for name, r in reports.items():
        figures = (len(r.recoveries), r.total_steps, r.steps_repeated, r.generations, round(r.seconds))
        table.add_row(name, *map(str, figures), "yes" if r.completed else "NO", r.kept)
    console.print(table)
    recoveries = [recovery for report in reports.values() for recovery in report.recoveries]
    console.print(recovery_table(f"{len(recoveries)} faults in {len(reports)} runs", recoveries))


sys.exit(main())
