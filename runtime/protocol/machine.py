"""The base of the state machines, and the story that each keeps: what has happened of late, for when it goes wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import msgspec

from graphft.errors import GraphftError

LONGEST = 1000
"""Characters of a line of a story, which may hold what a peer sent."""


class IllegalTransition(GraphftError):
    """An event that the state does not allow, or a broken invariant: a fault of the program, never of the network."""


class Event(msgspec.Struct, frozen=True):
    """Base of what a machine takes in."""


class Effect(msgspec.Struct, frozen=True):
    """Base of what a machine decides, which its driver carries out."""


class Machine:
    """A state machine without clock, network or threads. Only `step` changes it."""

    KIND: ClassVar[str]
    EVENTS: ClassVar[dict[type, Callable[[Any, Any], list[Any]]]]

    def __init__(self) -> None:
        self.story: deque[str] = deque(maxlen=512)
        self._now = 0.0

    def step(self, event: Event, now: float) -> list[Any]:
        """Takes in one event, and returns what is to be done, in order. Raises IllegalTransition."""
        self._now = now
        handler = self.EVENTS.get(type(event))
        if handler is None:
            self.illegal(f"{self.KIND} knows no event {event!r}")
        return handler(self, event)

    def tell(self, text: str) -> str:
        """Records a line of the story, and returns it: the reason of what is decided."""
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        self.story.append(f"{self._now:.3f} {text}")
        return text

    def illegal(self, what: str) -> NoReturn:
        """Raises IllegalTransition with the end of the story."""
        lines = "\n".join(f"  {line}" for line in list(self.story)[-40:])
        raise IllegalTransition(
            f"{what}\nthe story so far:\n{lines or '  (nothing)'}",
            rule="illegal-transition",
            help="this is a fault in graphft; report it with the story",
        )

    def invariants(self) -> dict[str, bool]:
        """Returns what always holds, and whether it does."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Raises IllegalTransition when the state contradicts itself. For tests, after each event."""
        for fact, holds in self.invariants().items():
            if not holds:
                self.illegal(f"broken invariant of {self.KIND}: {fact}")
