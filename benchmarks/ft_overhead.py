"""Measures the cost of fault tolerance per step:
`python benchmarks/ft_overhead.py [--pairs 4] [--seconds 15] [--json FILE]`.

Each job is run in turn with `ft=True` (a checkpoint every 50 steps) and with `ft=False`, whichever comes first taking
turns, too; each run is measured for some seconds when it is warm. What counts is the median, over these pairs of runs,
of the ratio of their times per step. (To let both run at once, and stop one by SIGSTOP while the other is measured, is
not fair: what was stopped for long has leases to renew, and answers to wait for, when it goes on.) CPU seconds per
step, by role, say where a difference comes from; other load disturbs them less. `--cost` prints those alone, of one run
of the flights with one pserver and one with two: `.ci/run` does, so that a regress is seen on the day.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import workloads

from graphft.runtime.process.metric_table import read_rows
from graphft.transpiler.job import Job

ROOT = Path(__file__).resolve().parents[1]
AIM = 1.02
START_SECONDS, WARM_SECONDS, WARM_STEPS = 120.0, 15.0, 200
"""By then each role has started the keeper of its lease."""
ROLES = ("launcher", "etcd", "pserver", "trainer")
JOBS = {"flights": workloads.flights, "convnet": workloads.convnet, "transformer": workloads.transformer}


@dataclass(frozen=True)
class Measured:
    """One run: seconds per step, and CPU seconds per step by role."""

    step: float
    cpu: dict[str, float]


class Run:
    """A job under a launcher of its own, which gets these options."""

    def __init__(self, job: Job, folder: Path, *options: str) -> None:
        self.folder = folder
        job.save(folder)
        command = [sys.executable, "-m", "graphft", "launch", "--job", str(folder), "--quiet", *options]
        self.launcher = psutil.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)

    def measure(self, seconds: float) -> Measured:
        try:
            self._warm_up()
            started, before = time.time(), self._cpu_seconds()
            time.sleep(seconds)
            ended, after = time.time(), self._cpu_seconds()
        finally:
            self.launcher.terminate()
            self.launcher.wait()
        times = self._times()
        steps = bisect.bisect(times, ended) - bisect.bisect(times, started)
        return Measured((ended - started) / steps, {role: (after[role] - before[role]) / steps for role in ROLES})

    def _warm_up(self) -> None:
        end = time.monotonic() + START_SECONDS
        time.sleep(WARM_SECONDS)
        while len(self._times()) < WARM_STEPS:
            if time.monotonic() > end or self.launcher.poll() is not None:
                raise RuntimeError(f"the job does not run; see {self.folder / 'logs'}")
            time.sleep(0.1)

    def _times(self) -> list[float]:
        """When the steps so far were applied, in Unix seconds."""
        return sorted(read_rows(self.folder).at.tolist())

    def _cpu_seconds(self) -> dict[str, float]:
        found = dict.fromkeys(ROLES, 0.0)
        for process in (self.launcher, *self.launcher.children(recursive=True)):
            name = process.name().split()[0]
            found[name if name in ROLES else "launcher"] += sum(process.cpu_times()[:2])
        return found


def compare(name: str, pairs: int, seconds: float) -> dict[bool, list[Measured]]:
    """By `ft`, the runs, in the order of their pairs."""
    found: dict[bool, list[Measured]] = {True: [], False: []}
    for i in range(pairs):
        for ft in (i % 2 == 1, i % 2 == 0):
            with tempfile.TemporaryDirectory() as folder:
                found[ft].append(Run(JOBS[name](ft=ft), Path(folder) / "job").measure(seconds))
    return found


def tell(name: str, plain: list[Measured], ft: list[Measured]) -> dict[str, Any]:
    """Prints what was found; returns it."""
    times = sorted(f.step / p.step for p, f in zip(plain, ft, strict=True))
    cpu = sorted(sum(f.cpu.values()) / sum(p.cpu.values()) for p, f in zip(plain, ft, strict=True))
    steps = [1e3 * statistics.median(m.step for m in runs) for runs in (plain, ft)]
    print(
        f"{name:11} {steps[0]:>8.2f} ms {steps[1]:>8.2f} ms {statistics.median(times):>10.3f} "
        f"{times[0]:>6.3f} -{times[-1]:>5.3f} {statistics.median(cpu):>7.3f}   {AIM}  {os.getloadavg()[0]:.1f}"
    )
    by_role = [[1e6 * statistics.median(m.cpu[role] for m in runs) for runs in (plain, ft)] for role in ROLES]
    print(
        "            CPU per step: "
        + ", ".join(f"{role} {a:.0f} -> {b:.0f} us" for role, (a, b) in zip(ROLES, by_role, strict=True)),
        flush=True,
    )
    return {
        "step_time_ratios": times,
        "cpu_ratios": cpu,
        "ft": [vars(m) for m in ft],
        "plain": [vars(m) for m in plain],
    }


def cost(seconds: float) -> None:
    """Prints CPU seconds per step by role."""
    for pservers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            cpu = Run(workloads.flights(pservers=pservers), Path(folder) / "job").measure(seconds).cpu
        by_role = ", ".join(f"{role} {1e3 * value:.2f}" for role, value in cpu.items())
        print(
            f"CPU ms per step, 2 trainers, pservers {pservers}: {1e3 * sum(cpu.values()):.2f} ({by_role})", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="runs with and without, each (default 4)")
    parser.add_argument("--seconds", type=float, default=15.0, help="for which each is measured (default 15)")
    parser.add_argument("--job", choices=JOBS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--cost", action="store_true", help="only print CPU seconds per step, by role")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    if options.cost:
        cost(options.seconds)
        return
    report = {}
    print(f"{'job':11} {'ft=False':>11} {'ft=True':>11} {'step time':>10} {'from - to':>13} {'CPU':>7}   aim   load")
    for name in options.job or JOBS:
        found = compare(name, options.pairs, options.seconds)
        report[name] = tell(name, found[False], found[True])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
