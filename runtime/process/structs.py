"""Types of records, made ready for threads.

msgspec looks at a struct's fields when it decodes one for the first time. Two threads that do so at the same moment end
the process (SIGSEGV): one of them uses what the other has not finished.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


def prepare_structs() -> None:
    """Has every struct of graphft looked at: to be called by a process's first thread, before it begins others."""
    for struct in _below(msgspec.Struct):
        if struct.__module__.startswith("graphft."):
            msgspec.json.Decoder(struct)


def _below(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for one in struct.__subclasses__():
        yield one
        yield from _below(one)
