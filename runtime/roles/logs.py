"""A role's log lines: who says it, at which step, and how much is said.

    12:04:31.207 [trainer 1 step 1042] took over slot 2 (its holder's lease ended)

GRAPHFT_DEBUG chooses the level, each with what the one before says: 1, what the protocol counts and refuses, with the
reasons; 2, the blocks that are run, with their times; 3, every event that the protocol's machine takes in, and every
effect that it decides on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from graphft.errors import UsageError

COUNTS, BLOCKS, EVENTS = logging.DEBUG, logging.DEBUG - 1, logging.DEBUG - 2
LEVELS = (logging.INFO, COUNTS, BLOCKS, EVENTS)

log = logging.getLogger("graphft")


class Stepper(Protocol):
    """A process that goes step by step."""

    @property
    def at_step(self) -> int | None:
        """The step (or version) that it is at; None before it has begun."""


class _Where(logging.Filter):
    """Puts who and at which step into every line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name_, self.stepper = name, None  # type: str, Stepper | None

    def filter(self, record: logging.LogRecord) -> bool:
        step = self.stepper.at_step if self.stepper is not None else None
        record.where = self.name_ if step is None else f"{self.name_} step {step}"
        return True


def log_as(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Has this process log to stderr under this name, at the level that the environment asks for."""
    handler = logging.StreamHandler()
    handler.addFilter(_Where(name))
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d [%(where)s] %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    log.setLevel(_level(environ.get("GRAPHFT_DEBUG") or "0"))


def follow(role: Stepper) -> None:
    """From now on the lines tell this role's step."""
    for handler in logging.getLogger().handlers:
        for found in handler.filters:
            if isinstance(found, _Where):
                found.stepper = role


def tell_event(event: object, effects: Sequence[object]) -> None:
    """GRAPHFT_DEBUG=3: an event that the machine took in, and what it decided."""
    if log.isEnabledFor(EVENTS):
        log.log(EVENTS, "%s -> %s", event, ", ".join(map(str, effects)) or "nothing")


def _level(text: str) -> int:
    if not text.isdecimal() or int(text) >= len(LEVELS):
        raise UsageError(
            f"GRAPHFT_DEBUG is {text!r}, expected 0 to {len(LEVELS) - 1}",
            rule="environment",
            help="correct or unset GRAPHFT_DEBUG",
        )
    return LEVELS[int(text)]
