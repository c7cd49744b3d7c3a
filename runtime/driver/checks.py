"""Calls of a Trainer: one at a time, and what makes no sense is refused before anything is done."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from graphft.errors import UsageError
from graphft.option_names import is_whole
from graphft.runtime.checkpoint.store import FOLDER
from graphft.runtime.process.role_process import ROLES


def check_retries(most: object) -> None:
    """Raises UsageError for what is no `max_retries`."""
    if not is_whole(most, -1):
        raise UsageError(f"max_retries is {most!r}, expected a number", rule="option", help="3, or so; -1: any number")


def check_role(role: object) -> None:
    """Raises UsageError for a name of no role."""
    if role not in ROLES:
        raise UsageError(
            f"there is no role {role!r}, expected one of {', '.join(ROLES)}",
            rule="option",
            help='a worker is a "trainer": trainer.signal("trainer", 0, signal.SIGKILL)',
        )


def check_place(path: str | os.PathLike[str], job_dir: Path, storage: str = "") -> None:
    """Raises UsageError for a place in which the run itself keeps its checkpoints. `storage`: of the run, a URL or its
    folder."""
    own = (job_dir / FOLDER).resolve()
    below = (
        f"{path}/".startswith(f"{storage}/{FOLDER}/")
        if "://" in str(path)
        else Path(path).resolve().is_relative_to(own)
    )
    if below:
        raise UsageError(
            f"{path} is where the run keeps its own checkpoints",
            rule="option",
            help='give another place, say f"{trainer.storage}/best"',
        )


def check_call(max_retries: object, checkpoint: object, epochs: object) -> None:
    """Raises UsageError for what `train` cannot be called with."""
    check_retries(max_retries)
    named = checkpoint is None or (isinstance(checkpoint, str) and checkpoint == "auto")
    if not (named or is_whole(checkpoint, 1)):
        raise UsageError(
            f"checkpoint is {checkpoint!r}, expected 'auto', None or a number of epochs",
            rule="option",
            help='checkpoint="auto"; within an epoch: checkpoint_every=, checkpoint_seconds= of Trainer',
        )
    if not is_whole(epochs, 1):
        raise UsageError(f"epochs is {epochs!r}, expected 1 or more", rule="option", help="leave it out for one")


class Alone:
    """One thread at a time trains: two would count the same epochs."""

    def __init__(self) -> None:
        self._busy, self._busy_in = threading.Lock(), 0

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Raises UsageError while another call, perhaps of another thread, is in one of these."""
        if not self._busy.acquire(blocking=False):
            inside = self._busy_in == threading.get_ident()
            raise UsageError(
                f"{what} was called " + ("by a callback of train()" if inside else "while another thread trains"),
                rule="busy",
                help="call it when train() has returned"
                if inside
                else "use a Trainer from one thread; workers(), events() and signal() may be called from any",
            )
        self._busy_in = threading.get_ident()
        try:
            yield
        finally:
            self._busy.release()
