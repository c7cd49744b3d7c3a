"""The story of a state machine's entities: what happened to them of late, shown when something goes wrong.

An entity is a short name such as "step 12", "slot 3" or "peer 5f2a"; one line may concern several of them.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from graphft.errors import GraphftError

LONGEST = 1000
"""Characters of a line."""


class IllegalTransition(GraphftError):
    """An event that the state does not allow, or a broken invariant: a fault of the program, never of the network."""


class Story:
    """The last `size` lines, each with the time and the entities that it is about.

    A line may hold what a peer sent: it is cut after `LONGEST` characters, so that the story has a bound."""

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
        """Lines about any of these entities, oldest first; of all of them when none is named."""
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
