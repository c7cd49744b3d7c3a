"""Tells the person who started a launch how it ends, also when it is interrupted."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.output import output_of
from graphft.runtime.process.interrupts import Handler

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig


def tell(line: str) -> None:
    """Prints a line on stderr: a program that reads what a script prints is not disturbed. Nothing is raised, and a
    terminal that takes no output delays nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none: there is nobody to tell
        print(line, file=output_of(sys.stderr), flush=True)


class Warnings(logging.Handler):
    """Prints warnings on stderr, as logging does without a handler, and delays nothing."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record))


class Interrupted(KeyboardInterrupt, SystemExit):
    """Ctrl-C, SIGTERM or SIGHUP has ended a launch, in order. A script that does not catch it ends without a traceback,
    with the exit status of the signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal.Signals(signum).name} has ended the launch")
        self.signum, self.code = signum, 128 + signum


@dataclass(slots=True)
class Reached:
    """An observer that tells where a launch is when that is interrupted."""

    job_dir: Path
    config: JobConfig
    status: JobStatus | None = None
    """The last one seen."""

    def look(self, status: JobStatus) -> None:
        self.status = status

    def describe(self) -> str:
        status, of = self.status, self.config.of_steps
        step = f" at step {status.step}{of}" if status is not None else ""
        if status is not None and status.state == "complete":
            return f"interrupted{step}; {self.job_dir} is complete"
        if not self.config.ft:
            return f"interrupted{step}; without fault tolerance (ft=False) the next run begins anew"
        at = f" at step {status.checkpoint}{of}" if status is not None and status.checkpoint is not None else ""
        return f"interrupted{step}; run again to resume {self.job_dir}{at}"


@contextlib.contextmanager
def interruptible(last_words: Callable[[], str]) -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does: children and etcd stop in order, then one line is told."""
    try:
        with _raised_by_signals():
            yield
    except KeyboardInterrupt as error:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C again
            tell(last_words())
        raise Interrupted(error.signum if isinstance(error, Interrupted) else signal.SIGINT) from None


@contextlib.contextmanager
def _raised_by_signals() -> Iterator[None]:
    """Leaves signals that are ignored (SIGHUP under nohup), or that somebody else handles; SIGTERM is always taken."""
    with contextlib.ExitStack() as stack:
        main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM) if main else ():
            before = signal.getsignal(number)
            if number == signal.SIGTERM or before in (signal.default_int_handler, signal.SIG_DFL):
                stack.callback(signal.signal, number, before)
                signal.signal(number, Handler(_interrupt))
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
