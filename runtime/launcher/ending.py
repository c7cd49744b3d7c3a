"""How a launch ends that did not complete its job: interrupted, or with an error; each is one clear message."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from graphft.runtime.checkpoint.store import saved_step
from graphft.runtime.coordination.job_storage import is_complete
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.launcher.run_folder import begun, where
from graphft.runtime.launcher.tell import tell
from graphft.runtime.process.interrupts import Handler
from graphft.runtime.process.threads import within

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig


WORDS_SECONDS = 5.0
"""For which the last words may wait for the job's storage."""


class Interrupted(KeyboardInterrupt, SystemExit):
    """Ctrl-C, SIGTERM or SIGHUP has ended a launch, in order. A script that does not catch it ends without a traceback,
    with the exit status of the signal: 130, 143 or 129. To a script that catches KeyboardInterrupt it is one."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal.Signals(signum).name} has ended the launch")
        self.signum, self.code = signum, 128 + signum


_TAKEN = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
"""Whose handlers a block replaces, if they are these; that of SIGTERM always."""


@dataclass(slots=True)
class Reached:
    """Where a launch is: what to say if it is interrupted."""

    job_dir: Path
    config: JobConfig
    status: JobStatus | None = None
    """The last one seen."""
    how: str = "interrupted"

    def look(self, status: JobStatus) -> None:
        self.status = status

    def describe(self) -> str:
        """Without what the job's storage would tell, if it does not answer soon."""
        step = f" at step {self.status.step}{self.config.of_steps}" if self.status is not None else ""
        brief = f"{self.how}{step}" + f"; run again to resume {self.job_dir}" * self.config.ft
        return within(WORDS_SECONDS, self._describe, brief)

    def _describe(self) -> str:
        step = f" at step {self._step()}{self.config.of_steps}" if self.status is not None else ""
        if is_complete(self.job_dir):
            return f"{self.how}{step}; {self.job_dir} is complete"
        if not self.config.ft:
            return f"{self.how}{step}; without fault tolerance (ft=False) the next run begins anew"
        at = f" {where(self.job_dir, self.config)}" if begun(self.job_dir) else ""
        return f"{self.how}{step}; run again to resume {self.job_dir}{at}"

    def _step(self) -> int:
        """A checkpoint may be newer than the last look at the job."""
        assert self.status is not None
        return max(self.status.step, saved_step(self.job_dir, self.config) or 0) if self.config.ft else self.status.step


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
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    with contextlib.ExitStack() as back:  # each is called, though a signal comes meanwhile
        for taken in filter(_is_to_be_taken, (*_TAKEN, signal.SIGTERM)):
            ours = _Taken(taken)
            back.callback(ours.give_back)
            signal.signal(taken, ours.handler)
        yield


def _is_to_be_taken(signum: signal.Signals) -> bool:
    """Under nohup SIGHUP is ignored, and stays so; somebody else's handler of SIGINT stays, too."""
    return signum not in _TAKEN or signal.getsignal(signum) == _TAKEN[signum]


class _Taken:
    """A signal whose handler a block replaces, and gives back. One that the user's code has set within the block, in a
    callback, stays; and whoever keeps the block's, to set it again later, has the one from before the block then."""

    def __init__(self, number: signal.Signals) -> None:
        self.number, self.before, self.over = number, signal.getsignal(number), False
        self.handler = Handler(self._interrupt)

    def give_back(self) -> None:
        self.over = True
        if signal.getsignal(self.number) is self.handler:
            signal.signal(self.number, self.before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.over:
            raise Interrupted(number)
        if callable(self.before):
            self.before(number, frame)
        else:
            signal.signal(number, self.before)
            signal.raise_signal(number)
