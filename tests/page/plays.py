"""A job as a page sees it, made up: what etcd, folder and launcher would tell of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from graphft.runtime.coordination.records import Event, Validated
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.page.job_page import Look, running
from graphft.runtime.page.time_keeper import seen_of
from graphft.runtime.protocol.time_ledger import TimeLedger

SPEC = {
    "trainers": 3,
    "pservers": 2,
    "sync": True,
    "ft": True,
    "passes": 4,
    "total_steps": 1000,
    "folder": "/j/flights",
}


NEWEST = {"loss": 0.25, "accuracy": 0.9}


def status(step: int = 400, **changes: Any) -> JobStatus:
    def member(name: str, **more: Any) -> dict[str, Any]:
        return {"id": name, "host": "node-a", "pid": 71, "address": "", **more}

    split = {"computing": step / 10, "data": 1.0, "shards": step / 40, "idle": 0.5}
    told = {"samples_per_second": 512.0, "seconds": split, "step": step}
    usual: dict[str, Any] = {
        "pservers": {
            i: member(f"p{i}", version=step + i, rounds_per_second=9.5, staleness=[], metrics=NEWEST) for i in range(2)
        },
        "trainers": {name: member(name, **told) for name in ("0-aa", "1-bb")},
        "slots": {0: "0-aa", 1: "1-bb", 2: "0-aa"},
        "queue": {"todo": 3, "pending": 2, "done": 5},
        "validated": Validated(300, 1, 64, {"loss": 0.5, "auc": 0.75}, 0.0),
        "validating": [400],
    }
    return replace(JobStatus("flights", "running", SPEC, 1, 1, step, 300), **{**usual, **changes})


class Job:
    """`look` is what a JobPage asks; `status`, `events` and `error` may be changed meanwhile."""

    def __init__(self) -> None:
        self.status = status()
        self.events: list[Event] = []
        self.error: Exception | None = None
        self.looks = 0
        self.ledger = TimeLedger(time.time() - 100)
        self.ledger.seconds |= {"productive": 80.0, "recovering": 4.0, "redone": 6.0, "data": 7.0, "starting": 3.0}

    def look(self) -> Look:
        self.looks += 1
        if self.error is not None:
            raise self.error
        self.ledger.step(seen_of(self.status), time.time())
        document = running(self.status, "127.0.0.1:2379")
        return Look(document, self.events, self.ledger.export())
