"""Who a shard knows: connections that have said hello, and the names that they gave."""

from __future__ import annotations

from collections.abc import Iterator


class Peers:
    """One connection per name, the newest; and `limit` names at most, so that what a shard keeps for its peers has a
    bound. The connection that was introduced first gives way: if it is alive, it says hello again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._names: dict[str, str] = {}
        """By connection, in order of introduction."""

    def introduce(self, peer: str, name: str) -> list[str]:
        """Remembers a connection. Returns the others that are forgotten for it."""
        self._names.pop(peer, None)
        forgotten = [p for p, known in self._names.items() if known == name]
        others = [p for p in self._names if p not in forgotten]
        forgotten += others[: max(0, len(others) + 1 - self.limit)]
        for other in forgotten:
            del self._names[other]
        self._names[peer] = name
        return forgotten

    def leave(self, peer: str) -> None:
        """This connection is over. Does nothing when it is not known."""
        self._names.pop(peer, None)

    def name(self, peer: str) -> str:
        """The name that an introduced connection gave. Raises KeyError for one that is not."""
        return self._names[peer]

    def names(self) -> frozenset[str]:
        """Those of all introduced connections."""
        return frozenset(self._names.values())

    def __contains__(self, peer: object) -> bool:
        return peer in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
