"""The interface of engines: an engine starts, stops and watches processes of roles somewhere, and does nothing else.

The launcher's supervisor decides which processes there are to be, and starts again what died, on every engine alike.
To write one: an `Engine`, whose `start` returns a `Process`, and a dataclass of its options with a method `open`
(`Options`); `tests/engines/conformance.py` holds for it.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.records import Ordered
from graphft.runtime.process.identity import UNKNOWN, Identity
from graphft.runtime.process.role_process import last_lines

ENGINES = {"local": "local:Local", "ray": "ray:Ray", "slurm": "slurm:Slurm", "ssh": "ssh:Ssh"}
"""Names the file of this folder and the class in it that holds the engine's options (`Options`)."""


CLOSE_SECONDS = 3.0
"""Processes have so long to end when their engine is closed."""


class EngineError(GraphftError):
    """An engine cannot start a process now: no resources, a scheduler that does not answer. It is tried again later."""


@dataclass(frozen=True, slots=True)
class Order:
    """One process that is wanted. `index`: the pserver's, or a number for a trainer's or coordinator's log lines."""

    role: str
    index: int
    etcd: str
    """Endpoints, as the process reaches them."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True)
class Run:
    """The run whose processes an engine starts."""

    job_dir: Path
    """The run's folder on the launcher's machine."""
    job: str
    """The job as every machine finds it, for `graphft start ROLE --job`: its storage's URL, or the folder's path."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that every process needs."""
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The resources that one process of a role takes, in the engine's own names: {"trainer": {"CPU": 2, "GPU": 1}}."""

    def log(self, order: Order) -> Path:
        """Returns the file to which this role's processes append their output, if they can write to the launcher's
        folder."""
        return self.job_dir / "logs" / f"{order.role}-{order.index}.log"

    def arguments(self, order: Order) -> list[str]:
        """Returns those of `graphft start` on any machine."""
        return [order.role, f"--job={self.job}", f"--etcd={order.etcd}", f"--index={order.index}"]


class Process(ABC):
    """One process of a role, wherever it is: to be used like a `subprocess.Popen`."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.pid = 0
        """On its own machine; 0 until it exists. One that has ended, and has none, was never made."""
        self.identity: Identity = UNKNOWN
        """UNKNOWN until it exists, or if its machine does not tell."""
        self.place = ""
        """Tells people the machine: "" for this one, and until it is known; "waiting for ..." while the engine has no
        room for it."""
        self._status: int | None = None
        self._made, self._ended = threading.Event(), threading.Event()

    def await_made(self) -> Identity:
        """Waits until it exists, or never will."""
        self._made.wait()
        return self.identity

    def poll(self) -> int | None:
        """Returns its exit status, as of the last `wait`: a thread is to wait for it all the time. Negative: that
        signal. A process whose machine is lost was killed by SIGKILL."""
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if not self._ended.wait(timeout) or self._status is None:
            raise subprocess.TimeoutExpired(self.order.name, timeout or 0.0)
        return self._status

    @abstractmethod
    def send_signal(self, signum: int) -> None:
        """SIGTERM asks it to leave, SIGKILL ends it; for one that has no room yet, both take the order back."""

    def end(self, status: int) -> None:
        """Notes that it has ended, unless that is known."""
        self._status = status if self._status is None else self._status
        self._made.set()
        self._ended.set()


class Engine(ABC):
    """The engine of one run. Made by `Options.open`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._processes: list[Any] = []
        """Those that have not ended, and some that have."""
        self._cancelled = False

    @property
    def host(self) -> str:
        """The address of this machine at which its processes reach an etcd of the launcher's; "": they run on this
        machine, and reach its loopback. Raises UsageError if they reach none."""
        return ""

    def prepare(self) -> None:
        """Gets ready, and does not wait for it: processes will be wanted soon. What it has begun, `close` ends."""
        return

    @abstractmethod
    def start(self, order: Order) -> Process:
        """Returns at once. Raises EngineError or OSError: it is tried again, later and later; UsageError: never."""

    def list(self) -> Sequence[Ordered]:
        """All that it started and that has not ended. From any thread."""
        alive = [p for p in self._processes if p.poll() is None]
        return [Ordered(p.order.role, p.order.index, p.place, p.pid) for p in alive]

    def logs(self, order: Order, lines: int) -> Sequence[str]:
        """The last lines that the role's processes wrote; none if they are out of reach."""
        return last_lines(self.run.log(order), lines)

    def step(self) -> None:
        """Does what is to be done all the time; called several times a second. Does not wait. Raises UsageError when it
        finds that the job can never run."""
        return

    def check_open(self) -> None:
        """Raises EngineError once it is to start nothing more."""
        if self._cancelled:
            raise EngineError("this engine starts nothing more", rule="engine", help="the launch ends")

    def cancel_orders(self) -> None:
        """Starts nothing more; a process that does not exist yet never will."""
        self._cancelled = True
        for process in self._processes:
            if not process.pid:
                process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Ends all that it started, the engine's own helpers, too."""
        self._cancelled = True
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        end = time.monotonic() + CLOSE_SECONDS
        while any(process.poll() is None for process in self._processes) and time.monotonic() < end:
            time.sleep(0.05)


class Options(Protocol):
    """The options of an engine; a dataclass whose fields have defaults."""

    def open(self, run: Run) -> Engine:
        """Raises UsageError if it cannot be used here: what it needs is not installed, say."""


def engine_options(engine: str | Options) -> Options:
    """Returns an engine's options; of one that is named, its defaults. Raises UsageError for a name of none."""
    if not isinstance(engine, (str, type)) and callable(getattr(engine, "open", None)):
        return engine
    if not isinstance(engine, str) or engine not in ENGINES:
        help = f"it is one of {', '.join(ENGINES)}, or an engine's options; for Kubernetes see `graphft kubernetes JOB`"
        raise UsageError(f"there is no engine {engine!r}", rule="engine", help=help)
    module, name = ENGINES[engine].split(":")
    return cast(Options, getattr(importlib.import_module(f"graphft.runtime.engines.{module}"), name)())
