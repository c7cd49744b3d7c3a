"""The base of the shards of both modes: how a message is admitted, refused or answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from graphft.runtime.protocol.events import Count, PeerLeft, Received, Reply, ShardOptions
from graphft.runtime.protocol.machine import LONGEST, Machine
from graphft.runtime.protocol.messages import Code, Hello, Message, Query, Refused, Welcome, refusal_of_stranger


class Shard(Machine):
    """One shard's connections. `version`: of the parameters, in the `generation`."""

    MESSAGES: ClassVar[dict[type, Callable[[Any, str, Any, Any], list[Any]]]]
    """By the type of a message: handler(self, peer, message, payload) -> effects."""

    def __init__(self, options: ShardOptions, *, incarnation: str, generation: int, version: int) -> None:
        super().__init__()
        self.options, self.incarnation, self.generation, self.version = options, incarnation, generation, version
        self.peers: dict[str, str] = {}
        """By connection, the name that it gave; of each name the newest connection only."""

    def problem(self, message: Message, payload: Any) -> str:
        """Returns what is wrong with a message whatever the state is; "" if nothing."""
        raise NotImplementedError

    def introduced(self, peer: str, replaced: list[str]) -> None:
        """A connection said hello. `replaced`: older connections of the same name, which are forgotten."""
        raise NotImplementedError

    def left(self, peer: str, name: str) -> None:
        """The peer of this connection and name does not come back."""
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
        if message.run != self.options.run:
            return self.refuse(peer, "denied", f"{peer} does not belong to this run")
        if self.peers.get(peer, message.peer) != message.peer:
            self.peer_left(PeerLeft(peer))
        replaced = [other for other, name in self.peers.items() if name == message.peer and other != peer]
        for other in replaced:
            del self.peers[other]
        self.peers[peer] = message.peer
        self.introduced(peer, replaced)
        self.tell(f"{peer} said hello")
        return [self.welcome(peer)]

    def peer_left(self, event: PeerLeft) -> list[Any]:
        if (name := self.peers.pop(event.peer, None)) is not None:
            self.left(event.peer, name)
            self.tell(f"{event.peer} has left")
        return []

    def query(self, peer: str, message: Query, payload: Any) -> list[Any]:
        return [self.welcome(peer)]

    def welcome(self, peer: str) -> Reply:
        return Reply(peer, Welcome(self.options.shard, self.incarnation, self.generation, self.version))

    def refuse(self, peer: str, code: Code, reason: str) -> list[Any]:
        """Refuses a message. A stranger is told only the code."""
        known = peer in self.peers
        refused = Refused(code, reason[:LONGEST], self.generation, self.version) if known else refusal_of_stranger(code)
        return [Reply(peer, refused), self.count(f"refused-{code}", f"{peer}: {reason}")]

    def wrong_generation(self, peer: str, generation: int) -> list[Any]:
        """Returns the refusal of what is of another generation; [] if it is not."""
        if generation < self.generation:
            return self.refuse(peer, "stale-generation", f"generation {generation} is over, this is {self.generation}")
        if generation > self.generation:
            return self.refuse(peer, "not-ready", f"generation {generation} is not known here yet")
        return []

    def count(self, name: str, reason: str) -> Count:
        return Count(name, self.tell(reason))
