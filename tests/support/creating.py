"""Several that create the same file at the same time."""

from __future__ import annotations

import threading

from graphft.runtime.fs import FS


def create_together(fs: FS, path: str) -> int:
    """Four threads create the file, each with its number as the content; returns that of the one which did."""
    together, won = threading.Barrier(4), []

    def create(number: int) -> None:
        together.wait()
        if fs.create(path, bytes([number])):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = won
    return first
