"""Who gives room up when there is too little: a job does no step without all of its shards, and one trainer is enough.

What is lost with machines is ordered again as it died: trainers may have taken all the room that is left.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterable

from graphft.runtime.engines.base import Engine
from graphft.runtime.launcher.child import Child

log = logging.getLogger("graphft")

LOOK_SECONDS, NEXT_SECONDS = 1.0, 5.0
"""Between two looks; and after a trainer has given its room up: the engine has to give it to the shard."""


class Capacity:
    """Gives shards the room of trainers, one by one, the youngest first."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reserved = False
        """True if what room there is is reserved for shards: no trainer is to be ordered."""
        self._next = 0.0

    def step(self, children: Iterable[Child]) -> None:
        """To be called all the time."""
        there = [(child, child.process) for child in children if child.process is not None]
        alive = [(child, process) for child, process in there if process.poll() is None]
        shards = [(child, process) for child, process in alive if child.role == "pserver" and not process.pid]
        if not shards:
            self.reserved = False
            return
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        trainers = [(child, process) for child, process in alive if child.role == "trainer"]
        running = [(child, process) for child, process in trainers if process.pid]
        if not running:  # the orders that wait say how much room is wanted
            self.reserved = False
            return
        short = [child.name for child, process in shards if self.engine.lacks_room(process)]
        if not short:
            return
        self.reserved = True
        if len(running) < len(trainers):
            for process in [process for _, process in trainers if not process.pid]:
                process.send_signal(signal.SIGTERM)  # takes the order back: it would get the room
            return
        self._next = time.monotonic() + NEXT_SECONDS
        child, process = max(running, key=lambda found: found[0].started_at)
        log.warning("no room for %s: %s ends, and comes back when there is some", ", ".join(short), child.name)
        process.send_signal(signal.SIGKILL)
