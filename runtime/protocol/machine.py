"""The base of the state machines, and the story that each keeps: what has happened of late, for when it goes wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from graphft.errors import GraphftError

LONGEST = 1000
"""Characters of a line of a story."""
Event = TypeVar("Event")
Effect = TypeVar("Effect")


class IllegalTransition(GraphftError):
    """An event that the state does not allow, or a broken invariant: a fault of the program, never of the network."""


class Story:
    """The last `size` lines, each with the time and the entities that it is about, such as "step 12" or "slot 3".

    A line may hold what a peer sent, so it is cut after `LONGEST` characters."""

    __slots__ = ("_lines", "now")

    def __init__(self, size: int = 512) -> None:
        self.now = 0.0
        self._lines: deque[tuple[float, tuple[str, ...], str]] = deque(maxlen=size)

    def tell(self, text: str, *entities: str) -> str:
        """Records a line, and returns it: the reason of what is decided."""
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        self._lines.append((self.now, entities, text))
        return text

    def of(self, *entities: str) -> list[str]:
        """Returns the lines about any of these entities, oldest first; all lines if none is named."""
        return [
            f"{now:.3f} {text}" for now, about, text in self._lines if not entities or any(e in about for e in entities)
        ]

    def illegal(self, what: str, *entities: str) -> NoReturn:
        """Raises IllegalTransition with the story of these entities."""
        lines = "\n".join(f"  {line}" for line in self.of(*entities)[-20:])
        raise IllegalTransition(
            f"{what}\nstory of {', '.join(entities) or 'everything'}:\n{lines or '  (nothing)'}",
            rule="illegal-transition",
            help="this is a fault in graphft; report it with the story",
        )


class Machine(Generic[Event, Effect]):
    """A state machine without clock, network or threads. Only `step` changes it."""

    KIND: ClassVar[str]
    EVENTS: ClassVar[dict[type, Callable[[Any, Any], list[Any]]]]

    def __init__(self) -> None:
        self.story = Story()
        self._now = 0.0

    def step(self, event: Event, now: float) -> list[Effect]:
        """Takes in one event, and returns what is to be done, in order. Raises IllegalTransition."""
        self._now = self.story.now = now
        handler = self.EVENTS.get(type(event))
        if handler is None:
            self.story.illegal(f"{self.KIND} knows no event {event!r}")
        return handler(self, event)

    def invariants(self) -> dict[str, bool]:
        """Returns what always holds, and whether it does."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Raises IllegalTransition when the state contradicts itself. For tests, after each event."""
        for fact, holds in self.invariants().items():
            if not holds:
                self.story.illegal(f"broken invariant of {self.KIND}: {fact}")
