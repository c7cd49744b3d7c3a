"""An address behind which there are others: what comes in is passed on to one of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence

PIECE = 1 << 16


class Relay:
    """Listens at `here`; each connection goes to the next of the `targets` that there are then."""

    def __init__(self, here: tuple[str, int], targets: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self.here, self.targets, self._turn = here, targets, itertools.count()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            server = self._loop.run_until_complete(asyncio.start_server(self._relay, *self.here))
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            targets = self.targets()
            if targets:
                there = await asyncio.open_connection(*targets[next(self._turn) % len(targets)])
                ways = [self._pass(reader, there[1]), self._pass(there[0], writer)]
                await asyncio.wait(map(asyncio.ensure_future, ways), return_when=asyncio.FIRST_COMPLETED)
                there[1].close()
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                writer.write(data)
                await writer.drain()
