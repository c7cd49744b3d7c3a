"""What fault tolerance costs per step: `python benchmarks/ft_overhead.py [--windows 12] [--json FILE]`.

Each job runs twice at the same time, with `ft=True` (a checkpoint every 50 steps) and with `ft=False`; one of the two
is stopped (SIGSTOP, all of its processes) while the other runs for a window of some seconds. So both meet the same
machine, whatever else it does. What counts is the median, over pairs of windows that follow each other, of the ratio of
their times per step. CPU seconds per step, by role, say where a difference comes from; other load disturbs them less.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jobs
import psutil

from graphft.transpiler import Job

ROOT = Path(__file__).resolve().parents[1]
AIM = 1.02
START_SECONDS, WARM_STEPS = 120.0, 200
SETTLE = 0.4
"""Of a window, not counted: steps that were half done when the processes were stopped."""
ROLES = ("launcher", "etcd", "pserver", "trainer")
JOBS = {"flights": jobs.flights, "convnet": jobs.convnet, "transformer": jobs.transformer}


class Contestant:
    """A job that runs under a launcher of its own, and can be stopped and continued as a whole."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.folder, self.trainers = folder, job.config.trainers
        job.save(folder)
        command = [sys.executable, "-m", "graphft", "launch", "--job", str(folder), "--quiet"]
        self.launcher = psutil.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)},
                                     stderr=subprocess.DEVNULL)
        self.rates: list[float] = []
        self.cpu: list[dict[str, float]] = []

    def warm_up(self) -> None:
        end = time.monotonic() + START_SECONDS
        while len(self.times()) < WARM_STEPS * self.trainers:
            if time.monotonic() > end or self.launcher.poll() is not None:
                raise RuntimeError(f"the job does not run; see {self.folder / 'logs'}")
            time.sleep(0.1)

    def times(self) -> list[float]:
        """When the batches so far were computed, in Unix seconds."""
        lines = [line for path in (self.folder / "metrics").glob("*.jsonl")
                 for line in path.read_text().splitlines()]
        return sorted(json.loads(line)["at"] for line in lines if line.endswith("}"))

    def processes(self) -> list[psutil.Process]:
        return [self.launcher, *self.launcher.children(recursive=True)]

    def signal(self, signum: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def run(self, seconds: float) -> None:
        """One window: runs, and notes steps per second, and CPU seconds per step, by role."""
        self.signal(signal.SIGCONT)
        time.sleep(SETTLE)
        started, before = time.time(), self._cpu_seconds()
        time.sleep(seconds)
        ended, after = time.time(), self._cpu_seconds()
        self.signal(signal.SIGSTOP)
        times = self.times()
        steps = (bisect.bisect(times, ended) - bisect.bisect(times, started)) / self.trainers
        self.rates.append(steps / (ended - started))
        self.cpu.append({role: (after[role] - before[role]) / steps for role in before})

    def _cpu_seconds(self) -> dict[str, float]:
        found = dict.fromkeys(ROLES, 0.0)
        for process in self.processes():
            name = process.name().split()[0]
            found[name if name in ROLES else "launcher"] += sum(process.cpu_times()[:2])
        return found

    def cpu_of(self, role: str) -> float:
        """Median, in microseconds per step."""
        return 1e6 * statistics.median(cpu[role] for cpu in self.cpu)

    def close(self) -> None:
        self.launcher.terminate()
        self.signal(signal.SIGCONT)
        self.launcher.wait()


def compare(name: str, windows: int, seconds: float, folder: Path) -> dict[str, Contestant]:
    with contextlib.ExitStack() as stack:
        found: dict[str, Contestant] = {}
        for ft in (True, False):
            kind = "ft" if ft else "plain"
            found[kind] = Contestant(JOBS[name](ft=ft), folder / f"{name}-{kind}")
            stack.callback(found[kind].close)
        for contestant in found.values():
            contestant.warm_up()
        for contestant in found.values():
            contestant.signal(signal.SIGSTOP)
        for _ in range(windows):
            for contestant in found.values():
                contestant.run(seconds)
    return found


def tell(name: str, plain: Contestant, ft: Contestant) -> dict[str, Any]:
    """Prints what was found; returns it."""
    times = sorted(p / f for p, f in zip(plain.rates, ft.rates, strict=True))
    cpu = sorted(sum(f.values()) / sum(p.values()) for p, f in zip(plain.cpu, ft.cpu, strict=True))
    rates = [statistics.median(c.rates) for c in (plain, ft)]
    print(f"{name:11} {rates[0]:>9.1f}/s {rates[1]:>9.1f}/s {statistics.median(times):>10.3f} "
          f"{times[0]:>6.3f} -{times[-1]:>5.3f} {statistics.median(cpu):>7.3f}   {AIM}  {os.getloadavg()[0]:.1f}")
    print("            CPU per step: " + ", ".join(f"{role} {plain.cpu_of(role):.0f} -> {ft.cpu_of(role):.0f} us"
                                               for role in ROLES), flush=True)
    return {"step_time_ratios": times, "cpu_ratios": cpu, "ft_rates": ft.rates, "plain_rates": plain.rates,
            "ft_cpu": ft.cpu, "plain_cpu": plain.cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12, help="windows of each contestant (default 12)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window (default 2; leases last 10)")
    parser.add_argument("--job", choices=JOBS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    report = {}
    print(f"{'job':11} {'ft=False':>11} {'ft=True':>11} {'step time':>10} {'from - to':>13} {'CPU':>7}   aim   load")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.job or JOBS:
            found = compare(name, options.windows, options.seconds, Path(scratch))
            report[name] = tell(name, found["plain"], found["ft"])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
