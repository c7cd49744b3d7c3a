"""The base of the shards of both modes: how a message is admitted, refused or answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from graphft.runtime.protocol.events import Count, Received, Reply, ShardOptions
from graphft.runtime.protocol.machine import LONGEST, Effect, Event, Machine
from graphft.runtime.protocol.messages import Hello, Message, Query, Refused, Welcome, refusal_of_stranger


class Shard(Machine[Event, Effect]):
    """One shard's connections. `version`: of the parameters, in the `generation`."""

    MESSAGES: ClassVar[dict[type, Callable[[Any, str, Any, Any], list[Any]]]]
    """By the type of a message: handler(self, peer, message, payload) -> effects."""

    def __init__(self, options: ShardOptions, *, incarnation: str, generation: int, version: int) -> None:
        super().__init__()
        self.options, self.incarnation, self.generation, self.version = options, incarnation, generation, version
        self.peers = Peers(options.max_peers)

    def problem(self, message: Message, payload: Any) -> str:
        """Returns what is wrong with a message whatever the state is; "" if nothing."""
        raise NotImplementedError

    def introduced(self, peer: str, forgotten: list[str], gone: set[str]) -> None:
        """A connection said hello. `forgotten`: connections that gave way to it; `gone`: names without one now."""
        raise NotImplementedError

    def received(self, event: Received) -> list[Any]:
        peer, message = event.peer, event.message
        if isinstance(message, Hello):
            return self._hello(peer, message)
        if peer not in self.peers:
            return self.refuse(peer, "unknown-peer", f"{peer} has not said hello to {self.incarnation}")
        handler = self.MESSAGES.get(type(message))
        if handler is None:
            return self.refuse(peer, "malformed", f"{type(message).__name__} is not for {self.KIND}")
        if problem := event.fault or self.problem(message, event.payload):
            return self.refuse(peer, "malformed", problem)
        return handler(self, peer, message, event.payload)

    def _hello(self, peer: str, message: Hello) -> list[Any]:
        if not message.admits(self.options.run, self.options.secret):
            return self.refuse(peer, "denied", f"{peer} does not belong to this run")
        known = self.peers.names()
        forgotten = self.peers.introduce(peer, message.peer)
        self.introduced(peer, forgotten, set(known - self.peers.names()))
        self.story.tell(f"{peer} said hello", f"peer {peer}")
        return [self.welcome(peer)]

    def query(self, peer: str, message: Query, payload: Any) -> list[Any]:
        return [self.welcome(peer)]

    def welcome(self, peer: str) -> Reply:
        return Reply(peer, Welcome(self.options.shard, self.incarnation, self.generation, self.version))

    def refuse(self, peer: str, code: str, reason: str) -> list[Any]:
        """Refuses a message. A stranger is told only the code."""
        known = peer in self.peers
        refused = Refused(code, reason[:LONGEST], self.generation, self.version) if known else refusal_of_stranger(code)
        return [Reply(peer, refused), self.count(f"refused-{code}", f"{peer}: {reason}", f"peer {peer}")]

    def count(self, name: str, reason: str, *entities: str) -> Count:
        return Count(name, self.story.tell(reason, *entities))


class Peers:
    """Peers by connection: the newest connection of each name, and at most `limit` names, so that a shard's memory has
    a bound. The connection that was introduced first gives way; if it is alive, it says hello again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._names: dict[str, str] = {}

    def introduce(self, peer: str, name: str) -> list[str]:
        """Remembers a connection. Returns those that are forgotten for it."""
        self._names.pop(peer, None)
        forgotten = [p for p, known in self._names.items() if known == name]
        others = [p for p in self._names if p not in forgotten]
        forgotten += others[: max(0, len(others) + 1 - self.limit)]
        for other in forgotten:
            del self._names[other]
        self._names[peer] = name
        return forgotten

    def leave(self, peer: str) -> None:
        self._names.pop(peer, None)

    def name(self, peer: str) -> str:
        """Returns the name that an introduced connection gave."""
        return self._names[peer]

    def names(self) -> frozenset[str]:
        return frozenset(self._names.values())

    def __contains__(self, peer: object) -> bool:
        return peer in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
