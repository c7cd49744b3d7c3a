"""From a SIGKILL to the next completed step: `python benchmarks/recovery.py [--rounds 7] [--json FILE]`.

| scenario | what is killed | what is waited for |
| --- | --- | --- |
| trainer | one of two trainers | a step to which it cannot have contributed; the other takes its slot |
| pserver | one of two pservers; a spare process takes its place | the first step of the next generation |
| pserver, cold | the same, without a spare process: Python and torch are started anew | the same |
| whole job | the launcher, and with it all roles and etcd; the launcher is started again at once | the same |

Steps are seen from outside: a probe asks the shards for their versions every few milliseconds. A step is completed when
every shard has it. "caught up" is the time until the steps that were repeated are done, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import workloads

from graphft.runtime.coordination.connect import connect, read_note
from graphft.runtime.coordination.job_view import JobView, read_view
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.run_record import guest_login
from graphft.runtime.etcd import EtcdError, Watch
from graphft.runtime.protocol.messages import Hello, Query, Welcome
from graphft.runtime.transport import ZmqClient
from graphft.transpiler.job import Job

ROOT = Path(__file__).resolve().parents[1]
POLL = 0.004
LIMIT = 60.0
"""Seconds after which a recovery counts as failed."""
AIMS = {"trainer": 0.5, "pserver": 2.0, "pserver, cold": 2.0}
SETTLE = 6.0
"""Between kills: until the spare process stands by again, and a death does not count as one in a row."""


@dataclass(frozen=True)
class Seen:
    """The state of the shards: their common generation, the lowest and the highest version."""

    generation: int
    version: int
    highest: int


class Probe:
    """Asks the shards of a running job for their versions."""

    def __init__(self, job: Job, endpoints: str) -> None:
        self.shards, self.keys = job.config.pservers, Keys(job.config.name)
        self.etcd = connect(endpoints, wait=LIMIT)
        self._stack = contextlib.ExitStack()
        self.hello = Hello(job.run_id, "probe")
        self.watch = Watch(self.etcd, self.keys.control)
        self.client = ZmqClient("probe", login=self._stack.enter_context(guest_login(self.etcd, self.keys)))
        self._met: dict[int, str] = {}
        self._known: dict[int, Welcome] = {}

    @property
    def view(self) -> JobView:
        return read_view(self.keys, self.watch.snapshot().values())

    def look(self) -> Seen | None:
        """None while the shards are not all there, and of one generation."""
        for shard, record in self.view.pservers.items():
            if self._met.get(shard) != record.id:
                self._met[shard] = record.id
                self.client.connect(shard, record.keyed_address)
                self.client.send(shard, self.hello)
            self.client.send(shard, Query())
        end = time.monotonic() + POLL
        while (left := end - time.monotonic()) > 0:
            reply = self.client.receive(left)
            if reply is not None and isinstance(reply.message, Welcome):
                self._known[reply.shard] = reply.message
        told = [w for shard, w in self._known.items() if w.incarnation == self._met.get(shard)]
        if len(told) < self.shards or len({w.generation for w in told}) > 1:
            return None
        versions = [w.version for w in told]
        return Seen(told[0].generation, min(versions), max(versions))

    def wait(self, what: Callable[[Seen], bool]) -> Seen:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            seen = self.look()
            if seen is not None and what(seen):
                return seen
        raise TimeoutError(f"no recovery within {LIMIT:.0f} s; the last look gave {self.look()}")

    def close(self) -> None:
        self.client.close()
        self._stack.close()
        self.watch.close()
        self.etcd.close()


class Run:
    """A launched job."""

    def __init__(self, job: Job, folder: Path, fork_server: bool) -> None:
        self.job, self.folder, self.fork_server = job, folder, fork_server
        job.save(folder)
        self.launch()

    def launch(self) -> None:
        """Starts the launcher, and a probe once its etcd is there."""
        (self.folder / "etcd.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "graphft", "launch", "--job", str(self.folder), "--quiet"]
        self.launcher = subprocess.Popen(
            [*command, *([] if self.fork_server else ["--no-fork-server"])], env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        end = time.monotonic() + LIMIT
        while not (endpoints := read_note(self.folder).endpoints):
            if time.monotonic() > end or self.launcher.poll() is not None:
                raise RuntimeError(f"the job does not start; see {self.folder / 'logs'}")
            time.sleep(POLL)
        self.probe = Probe(self.job, endpoints)

    def close(self) -> None:
        self.probe.close()
        self.launcher.terminate()
        self.launcher.wait()


def trainer(run: Run, n: int) -> tuple[float, float]:
    """A step that only the others can have done: the second after what the shards have once it is dead."""
    trainers = run.probe.view.trainers
    victim = trainers[sorted(set(run.probe.view.slots.values()))[n % 2]]
    os.kill(victim.pid, signal.SIGKILL)
    started = time.monotonic()
    after = run.probe.wait(lambda seen: True)
    run.probe.wait(lambda seen: seen.version >= after.highest + 2)
    seconds = time.monotonic() - started
    return seconds, seconds


def pserver(run: Run, n: int) -> tuple[float, float]:
    victim = run.probe.view.pservers[n % 2]
    before = run.probe.wait(lambda seen: True)
    os.kill(victim.pid, signal.SIGKILL)
    return _recovered(run, before, time.monotonic())


def whole_job(run: Run, n: int) -> tuple[float, float]:
    before = run.probe.wait(lambda seen: True)
    run.launcher.kill()
    started = time.monotonic()
    run.launcher.wait()
    run.probe.close()
    run.launch()
    return _recovered(run, before, started)


def _recovered(run: Run, before: Seen, started: float) -> tuple[float, float]:
    """Until the first step of a new generation is completed, and until all that were repeated are."""
    seen, seconds, generation = before, 0.0, before.generation
    while seen.version <= before.highest or seen.generation == before.generation:
        seen = run.probe.wait(lambda seen: seen.generation > before.generation)
        begun = run.probe.view.generation
        if seen.generation > generation and begun is not None and seen.version > begun.step:
            seconds, generation = time.monotonic() - started, seen.generation  # again, if another begins
    return seconds, time.monotonic() - started


SCENARIOS: dict[str, tuple[Callable[[Run, int], tuple[float, float]], bool]] = {
    "trainer": (trainer, True),
    "pserver": (pserver, True),
    "pserver, cold": (pserver, False),
    "whole job": (whole_job, True),
}


@contextlib.contextmanager
def running(folder: Path, fork_server: bool) -> Iterator[Run]:
    run = Run(workloads.flights(), folder, fork_server)
    try:
        yield run
    finally:
        run.close()


def measure(name: str, rounds: int, folder: Path) -> list[tuple[float, float]]:
    kill, fork_server = SCENARIOS[name]
    times = []
    with running(folder, fork_server) as run:
        run.probe.wait(lambda seen: seen.version >= 60)  # a checkpoint is behind
        for n in range(rounds):
            time.sleep(SETTLE)
            try:
                times.append(kill(run, n))
            except EtcdError as error:
                raise RuntimeError(f"{name}: the probe lost etcd: {error}") from error
    return times


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"median": statistics.median(ordered), "p95": p95, "worst": ordered[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="kills per scenario (default 7)")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the jobs' folders, with their logs, there")
    options = parser.parse_args()
    found: dict[str, dict[str, object]] = {}
    print(f"{'killed':16} {'n':>3} {'median':>8} {'p95':>8} {'worst':>8} {'caught up':>10}   aim")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.scenario or SCENARIOS:
            folder = (options.keep or Path(scratch)) / name.replace(", ", "-").replace(" ", "-")
            times = measure(name, options.rounds, folder)
            s, up = summary([t for t, _ in times]), summary([t for _, t in times])
            aim = f"{AIMS[name]:.1f} s" if name in AIMS else "-"
            print(
                f"{name:16} {len(times):>3} {s['median']:>7.2f}s {s['p95']:>7.2f}s {s['worst']:>7.2f}s "
                f"{up['median']:>9.2f}s   {aim}",
                flush=True,
            )
            found[name] = {"seconds": [t for t, _ in times], "caught_up": [t for _, t in times], **s}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
