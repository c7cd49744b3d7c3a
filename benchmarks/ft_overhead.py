"""What fault tolerance costs per step: `python benchmarks/ft_overhead.py [--windows 12] [--json FILE]`.

Each job runs twice at the same time, with `ft=True` (a checkpoint every 50 steps) and with `ft=False`; one of the two
is stopped (SIGSTOP, all of its processes) while the other runs for a window of some seconds. So both meet the same
machine, whatever else it does. What counts is the ratio of the medians of steps per second.
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

import jobs
import psutil

from graphft.transpiler import Job

ROOT = Path(__file__).resolve().parents[1]
AIM = 1.02
START_SECONDS, WARM_STEPS = 120.0, 200
SETTLE = 0.4
"""Of a window, not counted: steps that were half done when the processes were stopped."""
JOBS = {"flights": jobs.flights, "convnet": jobs.convnet}


class Contestant:
    """A job that runs under a launcher of its own, and can be stopped and continued as a whole."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.folder, self.trainers = folder, job.config.trainers
        job.save(folder)
        command = [sys.executable, "-m", "graphft", "launch", "--job", str(folder), "--quiet"]
        self.launcher = psutil.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)},
                                     stderr=subprocess.DEVNULL)
        self.rates: list[float] = []
        self.cpu: list[float] = []

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
        """One window: runs, and notes steps per second, and CPU seconds (of all processes) per step."""
        self.signal(signal.SIGCONT)
        time.sleep(SETTLE)
        started, before = time.time(), self._cpu_seconds()
        time.sleep(seconds)
        ended, cpu = time.time(), self._cpu_seconds() - before
        self.signal(signal.SIGSTOP)
        times = self.times()
        steps = (bisect.bisect(times, ended) - bisect.bisect(times, started)) / self.trainers
        self.rates.append(steps / (ended - started))
        self.cpu.append(cpu / steps)

    def _cpu_seconds(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self.processes())

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=12, help="windows of each contestant (default 12)")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window (default 2; leases last 10)")
    parser.add_argument("--job", choices=JOBS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    report = {}
    print(f"{'job':10} {'ft=False':>14} {'ft=True':>14} {'time':>6} {'CPU':>6}   aim")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.job or JOBS:
            found = compare(name, options.windows, options.seconds, Path(scratch))
            plain, ft = found["plain"], found["ft"]
            rates = [statistics.median(c.rates) for c in (plain, ft)]
            cpu = [statistics.median(c.cpu) for c in (plain, ft)]
            print(f"{name:10} {rates[0]:>8.1f} /s   {rates[1]:>8.1f} /s   {rates[0] / rates[1]:>6.3f} "
                  f"{cpu[1] / cpu[0]:>6.3f}   {AIM}", flush=True)
            report[name] = {"step_time_ratio": rates[0] / rates[1], "cpu_ratio": cpu[1] / cpu[0],
                            **{f"{kind}_{what}": getattr(c, what) for kind, c in found.items()
                               for what in ("rates", "cpu")}}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
