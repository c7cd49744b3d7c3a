"""Output that delays nobody: neither a terminal that takes none (Ctrl-S) nor a full disk stops supervision."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import weakref
from collections import deque
from typing import TextIO

PARTS = 1000
"""So many lines wait at most; the oldest are dropped, which are mostly of progress."""
PATIENCE = 0.2
"""Seconds for which `flush` waits, once, for output that is stuck."""


class Output(io.TextIOBase):
    """Writes what it is given to the descriptor of `stream`, in order, in a thread that lives while there is some.

    Usually `flush` returns when all is written; while nothing moves it returns at once. Errors of the descriptor are
    not raised, as there is nobody to be told of them: what is written then is lost."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()  # what was printed before comes first
        self._number, self._encoding = stream.fileno(), stream.encoding
        self._line = ""
        self._parts: deque[bytes] = deque(maxlen=PARTS)
        self._moved = threading.Condition()
        self._at_work = self._stuck = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._moved:
            self._line += text
            if self._line.endswith("\n"):
                self._begin()
        return len(text)

    def flush(self) -> None:
        with self._moved:
            self._begin()
            if not self._stuck:
                self._stuck = not self._moved.wait_for(lambda: not self._at_work, PATIENCE)

    def _begin(self) -> None:
        if self._line:
            self._parts.append(self._line.encode(self._encoding, "backslashreplace"))
            self._line = ""
            if not self._at_work:
                self._at_work = True
                threading.Thread(target=self._run, name="output", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._moved:
                if not self._parts:
                    self._at_work = False
                    self._moved.notify_all()
                    return
                part = memoryview(self._parts.popleft())
            with contextlib.suppress(OSError):
                while part:
                    part = part[os.write(self._number, part) :]
                    self._stuck = False


_outputs: weakref.WeakKeyDictionary[TextIO, Output] = weakref.WeakKeyDictionary()


def output_of(stream: TextIO) -> TextIO:
    """Returns the Output of a stream that has a descriptor of its own; another stream (of a notebook, in memory) as it
    is: these do not block."""
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return stream
    stream.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks must not end the launcher
    try:
        if stream not in _outputs:
            _outputs[stream] = Output(stream)
    except (OSError, ValueError):  # it has none, or is closed
        return stream
    return _outputs[stream]  # type: ignore[return-value]
