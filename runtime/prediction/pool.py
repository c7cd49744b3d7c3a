"""The workers: each computes a chunk at a time. One that dies is replaced, and its chunk given out again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import selectors
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphft.errors import GraphftError
from graphft.runtime.execute.determinism import ONEDNN_ISA
from graphft.runtime.prediction.work import LOGS, Work
from graphft.runtime.process.log_tail import last_lines
from graphft.runtime.process.role_environment import role_environment
from graphft.runtime.process.role_process import describe_death, spawn

log = logging.getLogger("graphft")

Tell = Callable[[int, int], object]
MOST_DEATHS = 3
"""Of workers in a row with the same chunk, or before they were ready."""
LOG_LINES = 15
LOOK_SECONDS, TELL_SECONDS = 1.0, 60.0
"""How often it is looked whether workers live; and after how long without any answer that is told."""


@dataclass(eq=False)
class _Worker:
    """`chunk`: the one it has; None: it is not ready yet, or has nothing more to do."""

    index: int
    process: subprocess.Popen[bytes]
    ready: bool = False
    chunk: int | None = None


class Pool:
    """`count` workers at most, of this machine. `tell` hears how many chunks are done, and of how many."""

    def __init__(self, work: Work, count: int, onednn_isa: str, tell: Tell | None = None) -> None:
        self._work, self._count, self._tell = work, count, tell
        self._environment: Mapping[str, str] = {**role_environment(), ONEDNN_ISA: onednn_isa or "DEFAULT"}
        self._todo = deque(work.missing())
        self._all = len(work.data.chunks)
        self._done = self._all - len(self._todo)
        self._deaths: Counter[int | None] = Counter()
        self._selector = selectors.DefaultSelector()
        self._workers: dict[int, _Worker] = {}

    def run(self) -> None:
        """Until each chunk has its results. Raises GraphftError for what a worker cannot compute or read, and for a
        chunk that ends each worker that takes it."""
        try:
            heard = time.monotonic()
            while self._done < self._all:
                self._employ()
                ready = [key.data for key, _ in self._selector.select(LOOK_SECONDS)]
                for worker in ready or self._ended():
                    self._hear(worker)
                if ready:
                    heard = time.monotonic()
                elif time.monotonic() - heard > TELL_SECONDS:
                    self._tell_waiting()
                    heard = time.monotonic()
        finally:
            self._end()

    def _employ(self) -> None:
        """Those that have nothing to do, then new ones, as many as there is work for."""
        for worker in self._workers.values():
            if worker.ready and worker.chunk is None:
                self._give(worker)
        left = len(self._todo) + sum(w.chunk is not None for w in self._workers.values())
        for index in range(min(self._count, left)):
            if index not in self._workers:
                self._start(index)

    def _start(self, index: int) -> None:
        command = ["predict-worker", "--folder", str(self._work.folder)]
        process = spawn(command, self._log(index), self._environment, subprocess.PIPE, subprocess.PIPE)
        worker = self._workers[index] = _Worker(index, process)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def _ended(self) -> list[_Worker]:
        """A process that user code has forked holds the pipe of a worker that is dead: no end of it comes."""
        return [worker for worker in self._workers.values() if worker.process.poll() is not None]

    def _tell_waiting(self) -> None:
        for worker in (w for w in self._workers.values() if w.chunk is not None or not w.ready):
            at = self._work.where(worker.chunk) if worker.chunk is not None else "its start"
            log.warning("worker %d (pid %d) has been at %s for a minute", worker.index, worker.process.pid, at)

    def _hear(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        gone = worker.process.poll() is not None
        at_once = bool(select.select([worker.process.stdout], [], [], 0)[0])
        line = worker.process.stdout.readline() if at_once or not gone else b""
        answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"dead": True}
        if "error" in answer:
            raise GraphftError(answer["error"], rule=answer["rule"], help=answer["help"])
        if answer:
            self._bury(worker)
            return
        self._deaths.pop(worker.chunk, None)
        if worker.chunk is not None:
            self._done += 1
            if self._tell is not None:
                self._tell(self._done, self._all)
        worker.ready, worker.chunk = True, None

    def _give(self, worker: _Worker) -> None:
        if not self._todo:
            return
        worker.chunk = self._todo.popleft()
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: its output ends, too
            worker.process.stdin.write(b"%d\n" % worker.chunk)
            worker.process.stdin.flush()

    def _bury(self, worker: _Worker) -> None:
        self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        how = describe_death(worker.process.wait())
        del self._workers[worker.index]
        if worker.ready and worker.chunk is None:
            return
        self._deaths[worker.chunk] += 1
        at = f"with {self._work.where(worker.chunk)}" if worker.chunk is not None else "before it was ready"
        if self._deaths[worker.chunk] >= MOST_DEATHS:
            lines = "\n".join(last_lines(self._log(worker.index), LOG_LINES))
            raise GraphftError(
                f"{MOST_DEATHS} workers in a row died {at}, the last one: {how}\n{lines}".rstrip(),
                rule="worker-died",
                help="killed by SIGKILL, too little memory is likely: fewer workers, or a smaller batch_size",
            )
        if worker.chunk is not None:
            self._todo.appendleft(worker.chunk)
        log.warning("worker %d died %s (%s): another one computes them", worker.index, at, how)

    def _log(self, index: int) -> Path:
        return self._work.folder / LOGS / f"worker-{index}.log"

    def _end(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()
            for pipe in (worker.process.stdin, worker.process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._selector.close()


def cores(threads: int) -> int:
    """Workers that this machine computes with at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // threads)
