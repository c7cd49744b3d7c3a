"""The engine of Ray: each process of a role is the child of an actor, which Ray places by what it takes.

So it can be stopped, killed, and asked for its exit status as on any machine, while the actor answers. It ends with
the actor: the kernel sees to that, so that nothing is left where a worker of Ray was killed.

The launcher's supervisor starts roles again, as on every engine, for it alone tells a failure from a preemption. An
actor without room waits, so an autoscaler sees what is wanted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import exceptions
from ray.util import get_node_ip_address

from graphft.runtime.engines.base import Engine, EngineError, Order, Process, Run
from graphft.runtime.process.identity import UNKNOWN, Identity, identify
from graphft.runtime.process.role_process import EXIT_FAILED, spawn
from graphft.transpiler.record import read_record

log = logging.getLogger("graphft")

LOOK_SECONDS = 0.2
"""Between two looks at what the process has written."""
NEWS_SECONDS = 10.0
"""A question for news waits for some for so long."""
PIECE = 1 << 20


class News(msgspec.Struct, frozen=True, array_like=True):
    """`output`: what the process wrote since the last time. `status`: once it has ended, and its output is read."""

    identity: Identity
    node: str
    output: bytes
    status: int | None


class RoleActor:
    """`follow` waits while `send_signal` is called: to be made with `max_concurrency` of 2 or more."""

    def __init__(self, name: str, folder: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts `python -m graphft COMMAND`. `folder`: of the run on this node; made if it is not there."""
        self.node = ray.get_runtime_context().get_node_id()
        place = Path(folder) / self.node[:8]
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)  # where the process has its copy of the job
        self._log = place / "logs" / f"{name.replace(' ', '-')}.log"
        self._log.unlink(missing_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._identity = UNKNOWN
        self._status: int | None = None
        environment = {"GRAPHFT_HOST": get_node_ip_address(), **environment}
        # The kernel takes the thread that starts a process for its parent.
        threading.Thread(target=self._run, args=(command, environment), name=name, daemon=True).start()

    def follow(self, position: int, made: bool) -> bytes:
        """News (as msgpack): from this position of its output on. `made`: it is known that the process exists. Waits
        for some, up to NEWS_SECONDS."""
        end = time.monotonic() + NEWS_SECONDS
        while True:
            status = self._status
            output = self._read(position)
            if output or status is not None or (self._process is not None and not made) or time.monotonic() > end:
                whole = len(output) < PIECE
                return msgspec.msgpack.encode(News(self._identity, self.node, output, status if whole else None))
            time.sleep(LOOK_SECONDS)

    def send_signal(self, signum: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            process = spawn(command, self._log, environment)
        except OSError as error:
            self._log.write_text(f"it cannot be started: {error}\n")
            self._status = EXIT_FAILED
            return
        self._identity, self._process = identify(process.pid), process
        self._status = process.wait()

    def _read(self, position: int) -> bytes:
        try:
            with self._log.open("rb") as file:
                file.seek(position)
                return file.read(PIECE)
        except OSError:  # it is not there so far, or somebody has deleted it
            return b""


Amounts = Mapping[str, float]
OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
NO_ANSWER = (exceptions.RayError, RuntimeError, ConnectionError, TimeoutError)
CLOSE_SECONDS = 10.0
AGAIN_SECONDS = 0.5
"""Before an actor that did not answer, and is not known to be dead, is asked again."""


class RayEngine(Engine):
    """Made by `Ray.open`. `resources`: by role, what one process takes."""

    def __init__(self, run: Run, address: str, resources: Mapping[str, Amounts]) -> None:
        super().__init__(run)
        self._resources = resources
        self._connected = not ray.is_initialized()
        """True if the connection to Ray is this engine's own."""
        if self._connected:
            ray.init(address or None, log_to_driver=False)
        self._namespace = f"graphft-{read_record(run.job_dir).run_id}"
        self._folder = os.path.join(tempfile.gettempdir(), "graphft-ray", self._namespace)
        self._processes: list[RayProcess] = []
        self._numbers = itertools.count()

    @property
    def host(self) -> str:
        return os.environ.get("GRAPHFT_HOST") or str(get_node_ip_address())

    def start(self, order: Order) -> RayProcess:
        self.check_open()
        command = ["start", *self.run.arguments(order)]
        try:
            actor = self._actor(order).remote(order.name, self._folder, command, dict(self.run.environment))
        except NO_ANSWER as error:
            raise EngineError(f"Ray takes no actor now: {error}", rule="engine") from error
        log_file = self.run.log(order)
        log_file.parent.mkdir(parents=True, exist_ok=True)
        wants = ", ".join(f"{name}: {amount:g}" for name, amount in self._wants(order.role).items())
        process = RayProcess(order, actor, f"waiting for {{{wants}}}", log_file)
        self._processes = [p for p in self._processes if p.poll() is None] + [process]
        return process

    def close(self) -> None:
        super().close()
        end = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        if self._connected and ray.is_initialized():
            ray.shutdown()

    def _wants(self, role: str) -> Amounts:
        return {name: amount for name, amount in self._resources[role].items() if amount}

    def _actor(self, order: Order) -> Any:
        wanted = self._resources[order.role]
        return ray.remote(RoleActor).options(
            name=f"{order.name} #{next(self._numbers)}",
            namespace=self._namespace,
            max_restarts=0,
            max_concurrency=4,
            resources={name: amount for name, amount in wanted.items() if name not in OWN_OPTIONS},
            # Shards on nodes far apart, others together where there is room: both are wishes. A placement group would
            # have all of them wait for the last one's room.
            scheduling_strategy="SPREAD" if order.role == "pserver" else "DEFAULT",
            **{option: wanted[name] for name, option in OWN_OPTIONS.items() if name in wanted},
        )


class RayProcess(Process):
    """Its output is appended to `log_file`, if this machine can write that.

    An actor that is lost, with its node or alone, is a process that SIGKILL has ended.
    """

    def __init__(self, order: Order, actor: Any, place: str, log_file: Path) -> None:
        super().__init__(order)
        self.actor, self.place, self._log = actor, place, log_file
        self._killed_by = 0
        """The signal that ended it before it existed, or that killed it."""
        self._thread = threading.Thread(target=self._follow, name=f"ray: {order.name}", daemon=True)
        self._thread.start()

    def send_signal(self, signum: int) -> None:
        """SIGKILL ends the actor, with its process, and whether or not its node answers."""
        if self._status is not None:
            return
        if signum == signal.SIGKILL or (signum == signal.SIGTERM and not self._made.is_set()):
            self._killed_by = self._killed_by or signum
            self._kill_actor()
        elif self._made.is_set():
            self.actor.send_signal.remote(signum)

    def join(self, timeout: float) -> None:
        """Waits till nothing of it uses Ray any more."""
        self._thread.join(timeout)

    def _follow(self) -> None:
        position, status = 0, None
        while status is None:
            try:
                answer = ray.get(self.actor.follow.remote(position, self._made.is_set()))
                news = msgspec.msgpack.decode(answer, type=News)
            except exceptions.ActorUnavailableError:  # it may come back
                time.sleep(AGAIN_SECONDS)
                continue
            except (exceptions.RayError, OSError, RuntimeError) as error:
                status = self._status_of(error)
                break
            position += len(news.output)
            self._write(news.output)
            if news.identity != UNKNOWN:
                self.identity, self.place = news.identity, f"node {news.node[:8]}"
                self.pid = news.identity.pid
                self._made.set()
            status = news.status
        self._kill_actor()  # gives its resources back
        self.end(status)

    def _status_of(self, error: BaseException) -> int:
        lost = isinstance(error, exceptions.RayActorError) and not error.actor_init_failed
        if lost or self._killed_by or not ray.is_initialized():
            return -(self._killed_by or signal.SIGKILL)
        self._write(f"Ray cannot make its actor: {error}\n".encode())
        return EXIT_FAILED

    def _write(self, output: bytes) -> None:
        if output:
            with contextlib.suppress(OSError), self._log.open("ab") as file:
                file.write(output)

    def _kill_actor(self) -> None:
        """Ends it, or takes it back before it is made. Not an error if it is dead."""
        with contextlib.suppress(exceptions.RayError, ValueError, RuntimeError):
            ray.kill(self.actor, no_restart=True)
