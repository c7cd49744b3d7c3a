"""The interface of engines: an engine starts, stops and watches processes of roles somewhere, and does nothing else.

The launcher's supervisor decides which processes there are to be, and starts again what died, on every engine alike.
An engine knows nothing of training, and of etcd. To write one: a class with the methods of `Engine`, whose `start`
returns something that can be used like a `subprocess.Popen` (`Process`), and a dataclass of its options with a method
`open` (`Options`); `tests/engines/conformance.py` is what holds for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from graphft.errors import GraphftError, UsageError
from graphft.runtime.process.identity import Identity

ENGINES = {
    "local": "local:Local",
    "ray": "ray:Ray",
    "slurm": "slurm:Slurm",
    "kubernetes": "kubernetes.engine:Kubernetes",
    "ssh": "ssh:Ssh",
}
"""Names the file of this folder and the class in it that holds the engine's options (`Options`)."""


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


class Process(Protocol):
    """One process of a role, wherever it is: to be used like a `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """On its own machine; 0 until it exists. One that has ended, and has none, was never made."""

    @property
    def identity(self) -> Identity:
        """UNKNOWN until it exists, or if its machine does not tell."""

    @property
    def place(self) -> str:
        """Tells people the machine: "" for this one, and until it is known; "waiting for ..." while the engine has no
        room for it."""

    def await_made(self) -> Identity:
        """Returns when it exists, or never will."""

    def poll(self) -> int | None:
        """Its exit status, as of the last `wait`: somebody is to wait for it all the time. Negative: that signal.
        A process whose machine is lost was killed by SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired` after `timeout` seconds."""

    def send_signal(self, signum: int) -> None:
        """SIGTERM asks it to leave, SIGKILL ends it; for one that has no room yet, both take the order back."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A process of the run, as the engine sees it."""

    role: str
    index: int
    place: str
    state: str
    """"waiting", "running" or "ended"."""
    pid: int = 0
    """On its own machine; 0 while it is not known."""


class Engine(Protocol):
    """The engine of one run. Made by `Options.open`."""

    @property
    def host(self) -> str:
        """The address of this machine at which its processes reach an etcd of the launcher's; "": they run on this
        machine, and reach its loopback. Raises UsageError if they reach none."""

    def prepare(self) -> None:
        """Gets ready, and does not wait for it: processes will be wanted soon. What it has begun, `close` ends."""

    def start(self, order: Order) -> Process:
        """Returns at once. Raises EngineError or OSError: it is tried again, later and later; UsageError: never."""

    def list(self) -> Sequence[Listed]:
        """All that it started and that has not ended."""

    def logs(self, order: Order, lines: int) -> Sequence[str]:
        """The last lines that the role's processes wrote; none if they are out of reach."""

    def step(self) -> None:
        """Does what is to be done all the time; called several times a second. Does not wait. Raises UsageError when it
        finds that the job can never run."""

    def lacks_room(self, process: Process) -> bool:
        """True for an order that waits for room that others have; False for one that may just take its time."""
        return False

    def cancel_orders(self) -> None:
        """Starts nothing more; a process that does not exist yet never will."""

    def close(self) -> None:
        """Ends all that it started, the engine's own helpers, too."""


class Options(Protocol):
    """The options of an engine; a dataclass whose fields have defaults."""

    def open(self, run: Run) -> Engine:
        """Raises UsageError if it cannot be used here: what it needs is not installed, say."""


def engine_options(engine: str | Options) -> Options:
    """Returns an engine's options; of one that is named, its defaults. Raises UsageError for a name of none."""
    known = f"it is one of {', '.join(ENGINES)}"
    if not isinstance(engine, str):
        if isinstance(engine, type) or not callable(getattr(engine, "open", None)):
            found = f"engine is {engine!r}, expected a name or an engine's options"
            raise UsageError(found, rule="engine", help=known)
        return engine
    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine!r}", rule="engine", help=known)
    module, name = ENGINES[engine].split(":")
    return cast(Options, getattr(importlib.import_module(f"graphft.runtime.engines.{module}"), name)())
