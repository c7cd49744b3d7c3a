"""One job's page: what it shows is looked up each two seconds at most, however many browsers ask."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphft.errors import GraphftError, describe, plain_text
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.validations import read_validations
from graphft.runtime.page import document as documents
from graphft.runtime.page.curve import Curve
from graphft.runtime.page.time_keeper import OwnAccount
from graphft.runtime.process.metric_table import FILE
from graphft.runtime.protocol.time_ledger import Seen

log = logging.getLogger("graphft")

LOOK_SECONDS = 2.0
LOOK_PART, WAIT_PART = 0.004, 0.05
"""Looks take at most this part of the machine's cores, and of the time: one that took long is the last one for a
while."""
SHARE_SECONDS = 10.0
"""Over which it is told what trainers are at."""


@dataclass(frozen=True)
class Look:
    """One look at a job. `document`: `document.running` or `at_rest`; `kept`: `TimeLedger.export`, None if no launcher
    has kept it; `folder`: the job's, if it is on this machine; `seen`: of one that runs, for a ledger of the page's."""

    document: dict[str, Any]
    events: Sequence[Event] = ()
    kept: Mapping[str, Any] | None = None
    folder: Path | None = None
    seen: Seen | None = None


class JobPage:
    """`look` may be called by any thread, one at a time; it raises GraphftError for a job that cannot be looked at."""

    def __init__(self, look: Callable[[], Look]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._document: dict[str, Any] = {"state": "unknown", "events": []}
        self._json = documents.to_json(self._document)
        self._next = 0.0
        self._curve = Curve()
        self._from_table = False
        self._splits: deque[tuple[float, dict[str, Mapping[str, float]]]] = deque()
        self._checkpoint: dict[str, Any] = {}
        self._own = OwnAccount()

    def document(self) -> dict[str, Any]:
        """Nobody changes it afterwards."""
        self._refresh()
        return self._document

    def json(self) -> bytes:
        self._refresh()
        return self._json

    def look_again(self) -> None:
        """Who asks next sees how it is now."""
        with self._lock:
            self._next = 0.0

    def _refresh(self) -> None:
        with self._lock:
            began, used = time.monotonic(), time.thread_time()
            if began < self._next:
                return
            try:
                self._document = self._make(self._look())
            except GraphftError as error:
                self._document = {**self._document, "error": error.message}
            except Exception as error:  # of a page, which is never to hurt the job that it is about
                log.debug("the page could not be made", exc_info=True)
                self._document = {**self._document, "error": describe(error)}
            self._json = documents.to_json(self._document)
            took, used = time.monotonic() - began, time.thread_time() - used
            cores = len(os.sched_getaffinity(0))
            self._next = began + max(LOOK_SECONDS, took / WAIT_PART, used / (LOOK_PART * cores))

    def _make(self, found: Look) -> dict[str, Any]:
        document = dict(found.document)
        self._read_curve(found, document)
        documents.with_shares(document, self._shares(document))
        kept = found.kept if found.kept is not None else self._own.look(found.seen)
        documents.with_time(document, kept, by_page=found.kept is None)
        documents.with_events(document, found.events, kept, self._curve.step_at)
        if found.folder is not None:
            document["checkpoint"] = self._newest_checkpoint(found.folder, document)
        return document

    def _read_curve(self, found: Look, document: dict[str, Any]) -> None:
        """From the table that the first pserver writes here; else from what it reports, since this page began."""
        folder = found.folder
        if not self._from_table and folder is not None and (folder / FILE).exists():
            self._curve, self._from_table = Curve(), True
        if self._from_table and folder is not None:
            self._curve.read(folder)
        elif document.get("loss") is not None:
            values = {"loss": document["loss"], **document.get("metrics", {})}
            steps, at = np.array([int(document["step"] or 0)]), np.array([time.time()])
            self._curve.add(tuple(values), steps, np.ones(1), np.array([list(values.values())]), at)
        told = self._curve.to_json()
        document["curve"] = {
            **told,
            "source": "table" if self._from_table else "looks",
            "unread": plain_text(told["unread"]),
        }
        document["validations"] = (
            [{"step": step, "means": dict(row.metrics)} for step, row in read_validations(folder).items()]
            if folder is not None
            else []
        )

    def _shares(self, document: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """By trainer, the parts of its time of late."""
        now = time.monotonic()
        self._splits.append((now, {t["id"]: t["seconds"] for t in document.get("trainers", ())}))
        while len(self._splits) > 2 and now - self._splits[1][0] > SHARE_SECONDS:
            self._splits.popleft()
        shares = {}
        for name, last in self._splits[-1][1].items():
            first = next(splits[name] for _, splits in self._splits if name in splits)
            spent = {what: max(0.0, last[what] - first.get(what, 0.0)) for what in last}
            if total := sum(spent.values()):
                shares[name] = {what: seconds / total for what, seconds in spent.items()}
        return shares

    def _newest_checkpoint(self, folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
        """Its manifest is read once."""
        step = document["checkpoint"]["step"] if "checkpoint" in document else document.get("step")
        if not step or self._checkpoint.get("step") == step:
            return self._checkpoint or {"step": step}
        found = [m for m in checkpoints_of(folder).manifests() if m.step <= step]
        if not found:
            return {"step": step}
        newest = found[0]
        self._checkpoint = {
            "step": newest.step,
            "at": newest.meta.get("made", {}).get("at"),
            "bytes": newest.bytes,
            "shards": {str(part.shard): part.bytes for part in newest.parts},
        }
        return self._checkpoint
