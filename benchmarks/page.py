"""Measures the cost of a page per step: `python benchmarks/page.py [--pairs 4] [--seconds 15] [--job flights]`.

Each job is run in turn without a page, and with one that a browser looks at: status.json is asked for each second, as
its script does. Which comes first takes turns, too. What counts is the median, over these pairs of runs, of the ratio
of their times per step. On a machine that does other things as well, their spread says more, and so does the CPU that
the launcher and etcd take, in milliseconds per second: it is what a page takes away from those who train.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from ft_overhead import JOBS, Measured, Run

AIM = 1.005


@contextlib.contextmanager
def looked_at(port: int) -> Iterator[list[float]]:
    """Somebody has the page open. Yields the sizes of the answers, in KB."""
    over, sizes = threading.Event(), list[float]()

    def look() -> None:
        while not over.wait(1.0):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json") as found:
                sizes.append(len(found.read()) / 1e3)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        over.set()
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def measure(name: str, page: bool, seconds: float) -> tuple[Measured, list[float]]:
    port = free_port()
    options = ("--page-port", str(port)) if page else ()
    with tempfile.TemporaryDirectory() as folder, looked_at(port) if page else contextlib.nullcontext([]) as sizes:
        return Run(JOBS[name](), Path(folder) / "job", *options).measure(seconds), sizes


def _beside(run: Measured) -> float:
    """CPU seconds per second of those that compute nothing."""
    return (run.cpu["launcher"] + run.cpu["etcd"]) / run.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="runs with and without, each (default 4)")
    parser.add_argument("--seconds", type=float, default=15.0, help="for which each is measured (default 15)")
    parser.add_argument("--job", choices=JOBS, action="append", help="only this one (may be repeated)")
    options = parser.parse_args()
    print(
        f"{'job':11} {'without':>11} {'with':>11} {'step time':>10} {'from - to':>14}   launcher + etcd    aim   load"
    )
    for name in options.job or JOBS:
        found: dict[bool, list[Measured]] = {True: [], False: []}
        sizes: list[float] = []
        for i in range(options.pairs):
            for page in (i % 2 == 1, i % 2 == 0):
                measured, answers = measure(name, page, options.seconds)
                found[page].append(measured)
                sizes += answers
        ratios = sorted(w.step / p.step for p, w in zip(found[False], found[True], strict=True))
        steps = [1e3 * statistics.median(m.step for m in found[page]) for page in (False, True)]
        cpu = [1e3 * statistics.median(_beside(m) for m in found[page]) for page in (False, True)]
        print(
            f"{name:11} {steps[0]:>8.2f} ms {steps[1]:>8.2f} ms {statistics.median(ratios):>10.3f} "
            f"{ratios[0]:>6.3f} - {ratios[-1]:>5.3f}   {cpu[0]:>4.1f} -> {cpu[1]:>4.1f} ms/s   {AIM}  "
            f"{os.getloadavg()[0]:.1f}   ({statistics.median(sizes):.0f} KB an answer)",
            flush=True,
        )


if __name__ == "__main__":
    main()
