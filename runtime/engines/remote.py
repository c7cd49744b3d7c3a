"""Processes on other machines, each reached by a program of this machine (srun, ssh).

The role is run there by `remote_task`, which reports it. The thread that starts the program waits for it: a child that
ends with its parent ends with the parent's thread.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from graphft.runtime.engines.base import Engine, Order, Process, Run
from graphft.runtime.engines.remote_task import Begun, Ended
from graphft.runtime.process.role_process import EXIT_LEASE_LOST, tied

KILL_SECONDS = 5.0
"""A role may take so long to end after SIGKILL. One whose machine is lost does not: its program is ended then, and
the role, if it lives, has lost its lease."""
LINGER_SECONDS = 30.0
"""The program may take so long to end after its role: what a role has left there may hold its output open."""
LOOKED_AT = 20
"""So many machines' addresses are looked at, to find the one of this machine that they reach."""


class RemoteStep(Process):
    """A role on another machine, or the wish for one. Its output is appended to `log`.

    `command`: the program, with `given` on its stdin, which stays open; None: it has none. `host`: its machine, for
    people; "": one that it reports when it begins.
    """

    error_prefix = ""
    """The program begins its errors with this."""

    def __init__(
        self,
        order: Order,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        host: str = "",
        given: bytes | None = None,
    ) -> None:
        super().__init__(order)
        self.environment, self.host = environment, host
        self.place = f"waiting for {host or 'a node'}"
        self.asked_at = time.monotonic()
        self.refused = ""
        """Says why it has never begun; "" if it has, if it may do so still, or if the order was taken back."""
        self.lost = False
        """True if it had begun, and was heard of no more: its machine is lost, or the way to it."""
        self.begun: Begun | None = None
        self._given = given
        self._killed_at: float | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._spawning = threading.Lock()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        threading.Thread(target=self._run, args=(command, log), name=f"start {order.name}", daemon=True).start()

    def send_signal(self, signum: int) -> None:
        if self._status is not None:
            return
        if signum == signal.SIGKILL or (signum == signal.SIGTERM and self.begun is None):
            self._killed_at = self._killed_at or time.monotonic()
            self.kill()
        elif self.begun is not None:
            self.hand_on(signum)

    @abstractmethod
    def hand_on(self, signum: int) -> None:
        """Has the role get it, which has begun. Does not wait."""

    def kill(self) -> None:
        """Ends the role, or takes the order back. Does not wait."""
        self._signal_program(signal.SIGTERM)

    def give_up(self, seconds: float = KILL_SECONDS) -> None:
        """Ends a program that waits in vain for its killed role."""
        if self._status is None and self._killed_at is not None and time.monotonic() > self._killed_at + seconds:
            self._signal_program(signal.SIGKILL)

    def refuse(self, why: str) -> None:
        """Ends it because it takes too long to begin."""
        self.refused = why
        self._signal_program(signal.SIGKILL)

    def say(self, line: bytes) -> None:
        """Writes to the program's stdin, which has room for it: what was given has been read."""
        if self._program is not None and self._program.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                self._program.stdin.write(line)
                self._program.stdin.flush()

    def _signal_program(self, signum: int) -> None:
        with self._spawning:
            if self._program is not None:
                self._program.send_signal(signum)

    def _run(self, command: Sequence[str], log: Path) -> None:
        status = EXIT_LEASE_LOST
        try:
            status = self._await_end(command, log)
        except OSError as error:
            self.refused = str(error)
        finally:
            self.end(status)

    def _await_end(self, command: Sequence[str], log: Path) -> int:
        """Returns the role's exit status; EXIT_LEASE_LOST if it was never begun."""
        with self._spawning, log.open("ab") as out:
            if self._killed_at is not None:
                return EXIT_LEASE_LOST
            said_from = out.tell()
            # Outside this terminal's session: Ctrl-C is the launcher's. srun and ssh end their roles when they end.
            program = self._program = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL if self._given is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out.fileno(),
                env=dict(self.environment),
                start_new_session=True,
            )
        self.say(self._given or b"")
        ended = self._read(program)
        try:
            program.wait(None if ended is None else LINGER_SECONDS)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        if program.stdin is not None:
            with contextlib.suppress(OSError):  # what could not be said
                program.stdin.close()
        if self.begun is not None:
            self.lost = ended is None and self._killed_at is None
            return ended.status if ended is not None else -signal.SIGKILL
        if self._killed_at is None:
            said = self.refused or _last_error(log, said_from, self.error_prefix)
            self.refused = said or f"{Path(command[0]).name} ended with status {program.returncode}"
        return EXIT_LEASE_LOST

    def _read(self, program: subprocess.Popen[bytes]) -> Ended | None:
        """Reads what `remote_task` reports, among what a login shell may print. Returns when the role, or the program,
        has ended."""
        assert program.stdout is not None
        with program.stdout as lines:
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                    if self.begun is not None:
                        return msgspec.json.decode(line, type=Ended)
                    begun = msgspec.json.decode(line, type=Begun)
                    self.identity, self.pid, self.place = begun.process, begun.pid, self.host or begun.node
                    self.begun = begun
                    self._made.set()
        return None


Step = TypeVar("Step", bound=RemoteStep)


class RemoteEngine(Engine, Generic[Step]):
    """To be made an engine by `start`, `host` and `noted`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._processes: list[Step] = []

    @abstractmethod
    def noted(self, step: Step) -> None:
        """Takes in what there is to be learnt of a process that exists, or has ended. Called again and again."""

    def step(self) -> None:
        self.look()
        for step in self._processes:
            step.give_up()

    def close(self) -> None:
        super().close()
        for step in self._processes:
            step.give_up(0.0)

    def look(self) -> None:
        """Forgets what has ended."""
        over = [step for step in self._processes if step.poll() is not None]
        self._processes = [step for step in self._processes if step not in over]
        for step in [*over, *(step for step in self._processes if step.pid)]:
            self.noted(step)


def _last_error(log: Path, start: int, prefix: str) -> str:
    """Returns the program's last error."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith(prefix)] or lines
    return errors[-1].removeprefix(prefix).strip() if errors else ""
