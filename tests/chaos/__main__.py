"""`make chaos`: several jobs, each under its own schedule of faults; figures in out/chaos.json. Takes a while."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from graphft.runtime.chaos.prepare import Prepared, prepare, run_chaos, save_script
from graphft.runtime.chaos.recovery import Recovery
from graphft.runtime.chaos.report import Report, summaries
from graphft.runtime.chaos.run import ChaosOptions
from graphft.runtime.chaos.schedule import CLUSTER_WEIGHTS, WEIGHTS

EXAMPLES = Path("examples")
PROCESSES = (*WEIGHTS, *CLUSTER_WEIGHTS)


@dataclass(frozen=True)
class Plan:
    """One run. Messages suffer in one of them only, as a lost one costs the seconds after which it is asked for again:
    the others' recoveries are those of the processes."""

    name: str
    script: tuple[str, ...]
    faults: int
    members: int
    kinds: tuple[str, ...] = ()

    def options(self, seed: int, share: float) -> ChaosOptions:
        possible = tuple(k for k in self.kinds if self.members > 1 or k not in CLUSTER_WEIGHTS)
        return ChaosOptions(max(1, round(self.faults * share)), seed, possible, self.members, patience=300.0)


PLANS = (
    Plan("flights", ("03_flights.py", "--small", "--kill-at", "0", "--passes", "60"), 55, 1, PROCESSES),
    Plan("digits", ("02_digits.py", "--passes", "60"), 55, 3, PROCESSES),
    Plan("gpt", ("04_tiny_gpt.py", "--small", "--passes", "30"), 50, 1, PROCESSES),
    Plan("messages", ("02_digits.py", "--passes", "60"), 45, 1),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the schedules (default: the time)")
    parser.add_argument("--share", type=float, default=1.0, help="of the faults of each run (default: 1)")
    parser.add_argument("--only", default="", help="run only the plan of this name")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    console, work = Console(highlight=False, markup=False, emoji=False, soft_wrap=True), options.out / "chaos"
    shutil.rmtree(work, ignore_errors=True)
    started, reports, known = time.monotonic(), [], dict[tuple[str, ...], Path]()
    for number, plan in enumerate(p for p in PLANS if options.only in ("", p.name)):
        console.print(f"===== {plan.name}: {' '.join(plan.script)}, {plan.members} etcd, seed {options.seed + number}")
        prepared = _prepare(plan, work / plan.name, known)
        report = run_chaos(prepared, plan.options(options.seed + number, options.share), console.print)
        console.print(report.render())
        reports.append(report)
    _summary(reports, console)
    (options.out / "chaos.json").write_text(json.dumps({
        "seconds": round(time.monotonic() - started, 1), "faults": dict(_faults(reports)),
        "recovery_seconds": summaries(_clean(reports)), "ok": all(r.ok for r in reports),
        "runs": [r.to_json() for r in reports]}, indent=1) + "\n")
    console.print(f"{time.monotonic() - started:.0f} s; figures in {options.out / 'chaos.json'}, the runs in {work}")
    return 0 if all(r.ok for r in reports) else 1


def _prepare(plan: Plan, work: Path, known: dict[tuple[str, ...], Path]) -> Prepared:
    """The plan's job, with the reference of an earlier plan of the same script."""
    if plan.script not in known:
        save_script(str(EXAMPLES / plan.script[0]), plan.script[1:], work / "job")
        prepared = prepare(work / "job", work, patience=300.0)
        known[plan.script] = prepared.reference
        return prepared
    return prepare(known[plan.script], work, patience=300.0)


def _recoveries(reports: list[Report]) -> list[Recovery]:
    return [recovery for report in reports for recovery in report.recoveries]


def _clean(reports: list[Report]) -> list[Recovery]:
    """Recoveries of the runs whose messages did not suffer."""
    return _recoveries([r for r in reports if not any(kind.startswith("message-") for kind in r.faults)])


def _faults(reports: list[Report]) -> Counter[str]:
    return sum((Counter(r.faults) for r in reports), Counter())


def _summary(reports: list[Report], console: Console) -> None:
    table = Table(title="all runs", title_justify="left")
    for column in ("run", "faults", "steps", "again", "generations", "seconds", "completed", "bit-identical"):
        table.add_column(column)
    for r in reports:
        table.add_row(r.job, str(len(r.recoveries)), str(r.total_steps), str(r.steps_repeated), str(r.generations),
                      f"{r.seconds:.0f}", "yes" if r.completed else "NO", "yes" if r.identical else "NO")
    console.print(table)
    recovery = Table(title="seconds from a fault to the next complete step", title_justify="left")
    for column in ("fault", "times", "median", "95 %", "worst"):
        recovery.add_column(column)
    for kind, s in summaries(_clean(reports)).items():
        recovery.add_row(kind, str(s["count"]), *(f"{s[k]:.2f}" for k in ("median", "p95", "worst")))
    console.print(recovery)
    total = len(_recoveries(reports))
    console.print(f"{total} faults in {len(reports)} runs: {dict(sorted(_faults(reports).items()))}")


sys.exit(main())
