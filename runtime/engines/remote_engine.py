"""What the engines have in common that reach each process by a program of this machine (`RemoteStep`)."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import graphft
from graphft.runtime.engines.base import Engine, Listed, Order, Run
from graphft.runtime.engines.remote_step import RemoteStep
from graphft.runtime.etcd import EmbeddedEtcd
from graphft.runtime.process.log_tail import last_lines

log = logging.getLogger("graphft")

Key = TypeVar("Key")
Step = TypeVar("Step", bound=RemoteStep)
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Between two tries of what is refused at once: twice as long each time."""
CLOSE_SECONDS = 3.0
LOOKED_AT = 20
"""Of how many machines the addresses are looked at, to find the one of this machine that they reach."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """`times`: how often in a row."""

    why: str
    at: float
    wait: float
    times: int


class Refusals(Generic[Key]):
    """What was refused, and is left alone for a while that grows."""

    def __init__(self) -> None:
        self._found: dict[Key, Refusal] = {}

    def note(self, key: Key, why: str, asked_at: float) -> bool:
        """Whether it is the first one in a row. One that was asked for before the last refusal tells nothing new."""
        before, now = self._found.get(key), time.monotonic()
        if before is None:
            self._found[key] = Refusal(why, now, FIRST_WAIT_SECONDS, 1)
        elif asked_at > before.at:
            self._found[key] = Refusal(why, now, min(LONGEST_WAIT_SECONDS, 2 * before.wait), before.times + 1)
        return before is None

    def forget(self, key: Key) -> bool:
        """Whether there was one."""
        return self._found.pop(key, None) is not None

    def get(self, key: Key) -> Refusal | None:
        return self._found.get(key)

    def now(self, key: Key) -> Refusal | None:
        """Why it is not to be tried now."""
        found = self._found.get(key)
        return found if found is not None and time.monotonic() < found.at + found.wait else None


class RemoteEngine(Engine, Generic[Step]):
    """To be made an engine by `start`, `host` and `noted`."""

    reaches_loopback = False

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps: list[Step] = []
        self._cancelled = False
        self._etcd: EmbeddedEtcd | None = None

    @property
    @abstractmethod
    def host(self) -> str:
        """This machine's address, as the others reach it."""

    @abstractmethod
    def noted(self, step: Step) -> None:
        """What there is to be learnt of a process that exists, or has ended. Called again and again."""

    def prepare(self) -> None:
        """Nothing is needed beforehand."""

    def provide_etcd(self) -> str:
        """Its data are not in the job's folder, which may be on a file system of all machines: too slow for etcd. The
        job goes on from its newest checkpoint in the next one."""
        host = self.host
        data = tempfile.mkdtemp(prefix="graphft-etcd-")
        self._etcd = EmbeddedEtcd(data, host=host)
        return ",".join(self._etcd.start().endpoints)

    def list(self) -> Sequence[Listed]:
        """From any thread: it changes nothing."""
        return [
            Listed(step.order.role, step.order.index, step.place, "running" if step.pid else "waiting", step.pid)
            for step in self._steps
            if step.poll() is None
        ]

    def logs(self, order: Order, lines: int) -> Sequence[str]:
        return last_lines(self._run.log(order), lines)

    def step(self) -> None:
        self.look()
        for step in self._steps:
            step.give_up()
        if self._etcd is not None and not self._etcd.running:
            log.warning("etcd died, starting it again with its data")
            self._etcd.start()

    def cancel_orders(self) -> None:
        self._cancelled = True
        for step in self._steps:
            step.take_back()

    def close(self) -> None:
        self._cancelled = True
        for step in self._steps:
            step.send_signal(signal.SIGKILL)
        end = time.monotonic() + CLOSE_SECONDS
        while any(step.poll() is None for step in self._steps) and time.monotonic() < end:
            time.sleep(0.05)
        for step in self._steps:
            step.give_up(0.0)
        if self._etcd is not None:
            self._etcd.stop()
            shutil.rmtree(self._etcd.data_dir, ignore_errors=True)

    def look(self) -> None:
        """Forgets what has ended."""
        over = [step for step in self._steps if step.poll() is not None]
        self._steps = [step for step in self._steps if step not in over]
        for step in [*over, *(step for step in self._steps if step.pid)]:
            self.noted(step)


def python_path(environ: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH of a role: this graphft, and what this process was given."""
    package = str(Path(graphft.__file__).resolve().parent.parent)
    return os.pathsep.join(filter(None, [package, environ.get("PYTHONPATH", "")]))
