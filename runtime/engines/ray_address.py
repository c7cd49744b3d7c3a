"""Which Ray a job uses. `ray.init` waits for minutes, without a word, for one that has died: here somebody looks."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("graphft")

VARIABLE, LOCAL, AUTO = "RAY_ADDRESS", "local", "auto"
ANSWER_SECONDS = 3.0
"""For how long a Ray may take to accept a connection."""


def choose_address(given: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """What `ray.init` is to be given. `given`: the user's address; "": he has named none.

    Ray notes in a file which one was started on this machine last, and the note outlives a Ray that is killed. That one
    is not waited for: the job gets a Ray of its own. One that the user has named is waited for, and he is told.
    """
    named = environment.get(VARIABLE, "") or given if given in ("", AUTO) else given
    if named in ("", AUTO):
        return _noted(named, note_in(environment))
    if not _listens(named):
        log.warning(
            "no Ray answers at %s; Ray waits for it, for some minutes at most. address=%r, or %s=%s: a Ray of the "
            "job's own",
            named,
            LOCAL,
            VARIABLE,
            LOCAL,
        )
    return given or None


def _noted(named: str, file: Path) -> str | None:
    """`named`: "auto" asks for one that runs, "" is content with one of the job's own."""
    noted = ""
    with contextlib.suppress(OSError):
        noted = file.read_text().strip()
    if not noted or _listens(noted):
        return named or None
    if named == AUTO:
        log.warning(
            "no Ray answers at %s, which %s names; Ray waits for it, for some minutes at most. If it has ended, delete "
            "that file",
            noted,
            file,
        )
        return AUTO
    log.warning(
        "no Ray answers at %s, which %s names: the job gets a Ray of its own. %s=%s: it waits for that one",
        noted,
        file,
        VARIABLE,
        noted,
    )
    return LOCAL


def note_in(environment: Mapping[str, str]) -> Path:
    """Where Ray notes the one that was started on this machine."""
    folder = environment.get("RAY_TMPDIR") or (environment.get("TMPDIR") if sys.platform.startswith("linux") else "")
    usual = "/tmp" if sys.platform.startswith(("linux", "darwin")) else tempfile.gettempdir()
    return Path(folder or usual) / "ray" / "ray_current_cluster"


def _listens(address: str) -> bool:
    """Whether somebody does, there. True for what is no host and port ("local", Ray Client's "ray://..."): Ray sees to
    that."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True
