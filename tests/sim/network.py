"""The data plane of a simulated world: the simulated driver of the transport, on the world's clock and threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphft.runtime.protocol.messages import decode
from graphft.runtime.transport.port import Limits
from tests.sim.transport import Faults, SimClient, SimNetwork, SimServer
from tests.sim.world import Task, World


class WorldNetwork(SimNetwork):
    """Messages take the world's time; who waits for one is a thread of the world."""

    def __init__(self, world: World, faults: Faults, latency: float) -> None:
        self.world = world
        self._waiting: dict[Task, Callable[[], bool]] = {}
        self.blocked: list[tuple[str, str]] = []
        """(client's identity, server's address) between which nothing passes now."""
        self.blocked_kinds: tuple[type, ...] = ()
        """Kinds of messages that do not pass, if not all."""
        super().__init__(faults, latency, Limits(max_frame=1 << 30))

    def passes(self, identity: str, address: str, header: memoryview) -> bool:
        if (identity, address) not in self.blocked:
            return True
        return bool(self.blocked_kinds) and not isinstance(decode(header), self.blocked_kinds)

    @property
    def now(self) -> float:  # type: ignore[override]
        return self.world.now

    @now.setter
    def now(self, time: float) -> None:
        """The world has it."""

    def at(self, time: float, event: Callable[[], None]) -> None:
        def happen() -> None:
            event()
            self.look()

        self.world.at(time, happen)

    def look(self) -> None:
        """Wakes who has something to take now."""
        for task, ready in list(self._waiting.items()):
            if not task.process.alive:
                del self._waiting[task]
            elif ready():
                self.world.wake(task)

    def run(self, until: float, ready: Callable[[], bool]) -> None:
        world = self.world
        world.check()
        task = world.current
        assert task is not None
        while not ready() and world.now < until:
            self._waiting[task] = ready
            try:
                world.park(until)
            finally:
                self._waiting.pop(task, None)

    def make_client(self, identity: str, *options: Any) -> WorldClient:
        client = WorldClient(self, identity)
        self.world.process.at_end.append(client.close)
        return client

    def make_server(self, *options: Any) -> WorldServer:
        server = WorldServer(self)
        self.world.process.at_end.append(server.close)
        return server


class WorldClient(SimClient):
    def send(self, *message: Any, **options: Any) -> Any:
        self.network.world.effect("send")  # type: ignore[attr-defined]
        return super().send(*message, **options)

    def wake(self) -> None:
        super().wake()
        self.network.look()  # type: ignore[attr-defined]


class WorldServer(SimServer):
    def send(self, *message: Any, **options: Any) -> Any:
        self._network.world.effect("answer")  # type: ignore[attr-defined]
        return super().send(*message, **options)

    def wake(self) -> None:
        super().wake()
        self._network.look()  # type: ignore[attr-defined]
