"""A role's log lines: who says it, at which step, and how much is said.

    12:04:31.207 [trainer 1 step 1042] took over slot 2 (its holder's lease ended)

GRAPHFT_DEBUG chooses the level, each with what the one before says: 1, what the protocol counts and refuses, with the
reasons; 2, the blocks that are run, with their times; 3, every event that the protocol's machine takes in, and every
effect that it decides on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from graphft.errors import UsageError

if TYPE_CHECKING:
    from graphft.runtime.roles.role import Role

COUNTS, BLOCKS, EVENTS = logging.DEBUG, logging.DEBUG - 1, logging.DEBUG - 2
LEVELS = (logging.INFO, COUNTS, BLOCKS, EVENTS)

log = logging.getLogger("graphft")


class _Where(logging.Filter):
    """Puts who and at which step into every line."""

    process: Role | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        step = self.process.at_step if self.process is not None else None
        record.where = self.name if step is None else f"{self.name} step {step}"
        return True


def log_as(name: str, environ: Mapping[str, str] = os.environ) -> Callable[[Role], None]:
    """Has this process log to stderr under this name, at the level that the environment asks for. What is returned has
    the lines tell the step of a role from then on."""
    handler, where = logging.StreamHandler(), _Where(name)
    handler.addFilter(where)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d [%(where)s] %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    log.setLevel(_level(environ.get("GRAPHFT_DEBUG") or "0"))
    return lambda role: setattr(where, "process", role)


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
