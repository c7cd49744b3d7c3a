"""Processes on other machines, each reached by a program of this machine (srun, ssh).

The role is run there by `remote_task`, which tells of it. The thread that starts the program waits for it: a child that
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
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from graphft.runtime.engines.base import Engine, Order, Process, Run
from graphft.runtime.engines.remote_task import Begun, Ended
from graphft.runtime.process.role_process import EXIT_LEASE_LOST, tied

T = TypeVar("T")
Key = TypeVar("Key")
KILL_SECONDS = 5.0
"""A role may take so long to end after SIGKILL. One whose machine is lost does not: its program is ended then, and
the role, if it lives, has lost its lease."""
LINGER_SECONDS = 30.0
"""The program may take so long to end after its role: what a role has left there may hold its output open."""
TURN_SECONDS = 10.0
"""One waits for so long for those that are to begin before it."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Between two tries of what is refused at once: twice as long each time."""
CLOSE_SECONDS = 3.0
LOOKED_AT = 20
"""So many machines' addresses are looked at, to find the one of this machine that they reach."""


class RemoteStep(Process):
    """A role on another machine, or the wish for one. Its output is appended to `log`.

    `command`: the program, with `given` on its stdin, which stays open; None: it has none. `waits_for`: what it waits
    for until it begins, for people. `after`: others that are to begin, or to be given up, before it.
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
        waits_for: str,
        given: bytes | None = None,
        after: Sequence[RemoteStep] = (),
    ) -> None:
        super().__init__(order)
        self.environment = environment
        self.place = f"waiting for {waits_for}"
        self.asked_at = time.monotonic()
        self.refused = ""
        """Why it has never begun; "" if it has, if it may do so still, or if the order was taken back."""
        self.lost = False
        """True if it had begun, and was heard of no more: its machine is lost, or the way to it."""
        self.begun: Begun | None = None
        self._given = given
        self._killed_at: float | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._spawning = threading.Lock()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.open("ab").close()
        threading.Thread(target=self._run, args=(command, log, after), name=f"start {order.name}", daemon=True).start()

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

    def take_back(self) -> None:
        """Ends it if it has not begun."""
        if self.begun is None:
            self.send_signal(signal.SIGKILL)

    def give_up(self, seconds: float = KILL_SECONDS) -> None:
        """Ends a program that waits in vain for its killed role."""
        if self._status is None and self._killed_at is not None and time.monotonic() > self._killed_at + seconds:
            self._signal_program(signal.SIGKILL)

    def refuse(self, why: str) -> None:
        """Ends it because it takes too long to begin."""
        self.refused = why
        self._signal_program(signal.SIGKILL)

    def say(self, line: bytes) -> None:
        """On the program's stdin, which has room for it: what was given has been read."""
        if self._program is not None:
            _write(self._program, line)

    def _signal_program(self, signum: int) -> None:
        with self._spawning:
            if self._program is not None:
                self._program.send_signal(signum)

    def _run(self, command: Sequence[str], log: Path, after: Sequence[RemoteStep]) -> None:
        end, status = time.monotonic() + TURN_SECONDS, EXIT_LEASE_LOST
        for other in after:
            other._made.wait(max(0.0, end - time.monotonic()))
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
            program = self._program = self._spawn(command, out.fileno())
        if self._given is not None:
            _write(program, self._given)
        ended = self._read(program)
        self._collect(program, None if ended is None else LINGER_SECONDS)
        if self.begun is not None:
            self.lost = ended is None and self._killed_at is None
            return ended.status if ended is not None else -signal.SIGKILL
        if self._killed_at is None:
            said = self.refused or _said(log, said_from, self.error_prefix)
            self.refused = said or f"{Path(command[0]).name} ended with status {program.returncode}"
        return EXIT_LEASE_LOST

    def _read(self, program: subprocess.Popen[bytes]) -> Ended | None:
        """Reads what `remote_task` tells, among what a login shell may print. Returns when the role, or the program,
        has ended."""
        assert program.stdout is not None
        with program.stdout as told:
            for line in told:
                if self.begun is not None:
                    if (ended := _decode(line, Ended)) is not None:
                        return ended
                elif (begun := _decode(line, Begun)) is not None:
                    self.identity, self.pid, self.place = begun.process, begun.pid, self.placed(begun)
                    self.begun = begun
                    self._made.set()
        return None

    @staticmethod
    def _collect(program: subprocess.Popen[bytes], seconds: float | None) -> None:
        try:
            program.wait(seconds)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        if program.stdin is not None:
            with contextlib.suppress(OSError):  # what could not be said
                program.stdin.close()

    def placed(self, begun: Begun) -> str:
        """Returns the name of its machine, for people."""
        return begun.node

    def _spawn(self, command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
        """Starts it outside this terminal's session: Ctrl-C is the launcher's. srun and ssh end their roles when they
        end."""
        return subprocess.Popen(
            tied(command),
            stdin=subprocess.DEVNULL if self._given is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=dict(self.environment),
            start_new_session=True,
        )


Step = TypeVar("Step", bound=RemoteStep)


@dataclass(frozen=True, slots=True)
class Refusal:
    """`times`: how often in a row."""

    why: str
    at: float
    wait: float
    times: int


class Refusals(Generic[Key]):
    """Things that were refused, and are left alone for a while that grows."""

    def __init__(self) -> None:
        self._found: dict[Key, Refusal] = {}

    def note(self, key: Key, why: str, asked_at: float) -> bool:
        """Returns True if it is the first one in a row. One that was asked for before the last refusal tells nothing
        new."""
        before, now = self._found.get(key), time.monotonic()
        if before is None:
            self._found[key] = Refusal(why, now, FIRST_WAIT_SECONDS, 1)
        elif asked_at > before.at:
            self._found[key] = Refusal(why, now, min(LONGEST_WAIT_SECONDS, 2 * before.wait), before.times + 1)
        return before is None

    def forget(self, key: Key) -> bool:
        """Returns True if there was one."""
        return self._found.pop(key, None) is not None

    def get(self, key: Key) -> Refusal | None:
        return self._found.get(key)

    def now(self, key: Key) -> Refusal | None:
        """Why it is not to be tried now."""
        found = self._found.get(key)
        return found if found is not None and time.monotonic() < found.at + found.wait else None


class RemoteEngine(Engine, Generic[Step]):
    """To be made an engine by `start`, `host` and `noted`."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._processes: list[Step] = []
        self._cancelled = False

    @property
    @abstractmethod
    def host(self) -> str:
        """This machine's address, as the others reach it."""

    @abstractmethod
    def noted(self, step: Step) -> None:
        """Learns what there is to be learnt of a process that exists, or has ended. Called again and again."""

    def step(self) -> None:
        self.look()
        for step in self._processes:
            step.give_up()

    def cancel_orders(self) -> None:
        self._cancelled = True
        for step in self._processes:
            step.take_back()

    def close(self) -> None:
        self._cancelled = True
        for step in self._processes:
            step.send_signal(signal.SIGKILL)
        end = time.monotonic() + CLOSE_SECONDS
        while any(step.poll() is None for step in self._processes) and time.monotonic() < end:
            time.sleep(0.05)
        for step in self._processes:
            step.give_up(0.0)

    def look(self) -> None:
        """Forgets what has ended."""
        over = [step for step in self._processes if step.poll() is not None]
        self._processes = [step for step in self._processes if step not in over]
        for step in [*over, *(step for step in self._processes if step.pid)]:
            self.noted(step)


def _write(program: subprocess.Popen[bytes], line: bytes) -> None:
    assert program.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it has ended
        program.stdin.write(line)
        program.stdin.flush()


def _decode(line: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _said(log: Path, start: int, prefix: str) -> str:
    """The program's last error."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith(prefix)] or lines
    return errors[-1].removeprefix(prefix).strip() if errors else ""
