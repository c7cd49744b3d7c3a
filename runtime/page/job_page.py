"""One job's page, as one JSON document: made of what etcd, its folder and its launcher tell.

`/status.json` is this document; the page and `/metrics` are made of it, and of nothing else. The job is looked at each
two seconds at most, however many browsers ask.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphft.disk.sealed_json import encode_json
from graphft.errors import GraphftError, describe, plain_text
from graphft.runtime.checkpoint.store import checkpoints_of
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.result_files import read_validations
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.page.time_keeper import OwnAccount
from graphft.runtime.process.metric_table import FILE, read_rows
from graphft.runtime.protocol.time_ledger import CATEGORIES, Seen, goodput_of

log = logging.getLogger("graphft")

BUCKETS = 512
LOOK_ROWS = 1 << 16
"""Read at a time: of a job with more rows, the curve grows from look to look."""
METRICS = 12
"""So many metrics have a curve, beside the loss."""
LOOK_SECONDS, LOOK_PART = 2.0, 0.01
"""Looks take at most this part of the time: one that took long is the last one for a while."""
SHARE_SECONDS = 10.0
"""The time over which the shares of what trainers do are computed."""
STRAGGLES = 0.15
"""A trainer is a straggler when it waits for the others by so much of its time less than they do for it."""
EVENTS = 100
"""So many are shown, the newest."""
FAULTS = {
    *("barred", "damaged-checkpoint", "died", "etcd-restarted", "failed", "hung", "discarded", "nonfinite"),
    *("rollback", "step-failed", "storage-unavailable", "storage-wait"),
}
"""Kinds of events that are marked on the curves."""
AFTER_FAULTS = ("takeover", "restarted")
"""Kinds that tell of a fault where no launcher does: a scheduler's processes."""
BEFORE_SECONDS, AFTER_SECONDS = 3.0, 1.0
"""An event belongs to a recovery that was seen to begin so long after it, or before: looks are apart, and so are the
clocks of machines."""


class Curve:
    """A job's loss and metrics over its steps, as a few hundred points, however long it trains: rows are summed up in
    buckets of `width` steps, each twice as wide when there are too many. Steps are counted from 0.
    """

    def __init__(self) -> None:
        self.width = 1
        self.unread = ""
        """Says why the table cannot be read."""
        self._names: tuple[str, ...] = ()
        self._read = 0
        self._last = -1
        self._at = np.full(BUCKETS, np.inf)
        self._samples = self._totals = np.zeros((BUCKETS, 0))

    def read(self, job_dir: Path) -> None:
        """Adds rows that are new in the table of this folder."""
        self.unread = ""
        try:
            rows = read_rows(job_dir, self._read, LOOK_ROWS)
        except (OSError, ValueError) as error:
            self.unread = f"its metrics cannot be read: {error}"
            return
        self._read += len(rows)
        numbers, known = rows.known()
        self.add(known.names, numbers, np.abs(known.data["samples"]), known.data["values"], known.at)

    def add(
        self, names: tuple[str, ...], steps: np.ndarray, samples: np.ndarray, values: np.ndarray, at: np.ndarray
    ) -> None:
        """`steps`: rising; `values`: for each step, and of `names`."""
        if not len(steps):
            return
        if not self._names:
            self._names = names[: 1 + METRICS]
            self._samples, self._totals = np.zeros((2, BUCKETS, len(self._names)))
        self._last = max(self._last, int(steps[-1]))
        while self._last // self.width >= BUCKETS:
            self._widen()
        buckets, values = steps // self.width, values[:, : len(self._names)]
        finite = np.isfinite(values)
        weights = samples[:, None] * finite
        np.minimum.at(self._at, buckets, at)
        np.add.at(self._samples, buckets, weights)
        with np.errstate(over="ignore"):
            np.add.at(self._totals, buckets, np.where(finite, values, 0.0) * weights)

    def _widen(self) -> None:
        self.width *= 2
        self._at = np.r_[self._at.reshape(-1, 2).min(1), np.full(BUCKETS // 2, np.inf)]
        pairs = [table.reshape(-1, 2, table.shape[1]).sum(1) for table in (self._samples, self._totals)]
        self._samples, self._totals = (np.r_[half, np.zeros_like(half)] for half in pairs)

    def step_at(self, at: float) -> int | None:
        """Returns the step that the job was at then; None before the first one that is known."""
        known = np.flatnonzero(np.isfinite(self._at))
        times = np.maximum.accumulate(self._at[known]).tolist()  # of an async job that went back they may fall
        place = bisect.bisect_right(times, at)
        return int(known[place - 1]) * self.width if place else None

    def to_json(self) -> dict[str, Any]:
        """`steps`, and by name as many values: None where a bucket has none."""
        known = np.flatnonzero(np.isfinite(self._at))
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (self._totals / self._samples)[known]
        series = {
            name: [float(f"{mean:.6g}") if mean == mean else None for mean in means[:, i].tolist()]
            for i, name in enumerate(self._names)
        }
        return {
            "steps": (known * self.width).tolist(),
            "series": {name: values for name, values in series.items() if any(v is not None for v in values)},
            "width": self.width,
        }


@dataclass(frozen=True)
class Look:
    """One look at a job. `document`: `running`, or what a folder at rest tells; `kept`: `TimeLedger.export`, None if no
    launcher has kept it; `folder`: the job's, if it is on this machine; `seen`: of one that runs, for a ledger of the
    page's."""

    document: dict[str, Any]
    events: Sequence[Event] = ()
    kept: Mapping[str, Any] | None = None
    folder: Path | None = None
    seen: Seen | None = None


def running(status: JobStatus, etcd: str) -> dict[str, Any]:
    """Returns what etcd, at the endpoints `etcd`, tells of a job."""
    slots = range(int(status.spec["trainers"])) if status.spec.get("sync") and status.spec.get("ft") else ()
    validated = status.validated
    return {
        **status.in_brief(etcd),
        "state": "idle" if status.idle else status.state,
        "metrics": status.metrics,
        "learning_rates": status.learning_rates,
        "samples_per_second": status.samples_per_second,
        "skipped_steps": status.skipped_steps,
        "generation": status.generation,
        "sync": bool(status.spec.get("sync")),
        "slots": [{"slot": slot, "trainer": status.slots.get(slot, "")} for slot in slots],
        "trainers": [_trainer(name, told, status) for name, told in status.trainers.items()],
        "shards": [_shard(index, told) for index, told in status.pservers.items()],
        "shards_wanted": int(status.spec.get("pservers", 0)),
        "coordinators": [{"name": name, "serving": told["serving"]} for name, told in status.coordinators.items()],
        "loading": [
            {"name": name, "role": told["role"], "what": told["what"], "seconds": round(told["seconds"], 1)}
            for name, told in status.loading.items()
        ],
        "without_room": status.without_room,
        "queue": status.queue,
        "discarded": sum(len(found.discards) for found in status.discarded.values()),
        "checkpoint": {"step": status.checkpoint},
        "etcd_full": status.etcd_full,
        "validated": {"step": validated.step, "epoch": validated.epoch, "means": validated.means}
        if validated is not None
        else None,
        "validating": status.validating,
    }


TRAINER: Mapping[str, Any] = {"step": None, "samples_per_second": 0.0, "seconds": {}, "waiting": "", "unreached": []}
SHARD: Mapping[str, Any] = {"version": None, "staleness_mean": 0.0, "staleness_max": 0}
"""A process may report these; until it does, they are so."""


def _told(told: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {"host": told["host"], "pid": told["pid"], **{name: told.get(name, usual[name]) for name in usual}}


def _trainer(name: str, told: Mapping[str, Any], status: JobStatus) -> dict[str, Any]:
    held = [slot for slot, holder in status.slots.items() if holder == name]
    return {"id": name, **_told(told, TRAINER), "slots": held, "straggler": False}


def _shard(index: int, told: Mapping[str, Any]) -> dict[str, Any]:
    return {"shard": index, **_told(told, SHARD), "per_second": told.get("rounds_per_second", 0.0)}


class JobPage:
    """`look` may be called by any thread, one at a time; it raises GraphftError for a job that cannot be looked at."""

    def __init__(self, look: Callable[[], Look]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._document: dict[str, Any] = {"state": "unknown", "events": []}
        self._json = b""
        self._next = 0.0
        self._curve = Curve()
        self._from_table = False
        self._splits: deque[tuple[float, dict[str, Mapping[str, float]]]] = deque()
        self._checkpoint: dict[str, Any] = {}
        self._own = OwnAccount()

    def document(self) -> dict[str, Any]:
        """Returns what nobody changes afterwards."""
        self._refresh()
        return self._document

    def json(self) -> bytes:
        self._refresh()
        return self._json

    def look_again(self) -> None:
        """Has the next who asks see how it is then."""
        with self._lock:
            self._next = 0.0

    def _refresh(self) -> None:
        with self._lock:
            began = time.monotonic()
            if began < self._next:
                return
            try:
                self._document = self._make(self._look())
            except GraphftError as error:
                self._document = {**self._document, "error": error.message}
            except Exception as error:  # of a page, which is never to hurt the job that it is about
                log.debug("the page could not be made", exc_info=True)
                self._document = {**self._document, "error": describe(error)}
            self._json = encode_json({**self._document, "now": time.time()})
            took = time.monotonic() - began
            self._next = began + max(LOOK_SECONDS, took / LOOK_PART)

    def _make(self, found: Look) -> dict[str, Any]:
        document = dict(found.document)
        self._read_curve(found.folder, document)
        self._add_shares(document)
        kept = found.kept if found.kept is not None else self._own.look(found.seen)
        document["time"] = _time(document, kept) | {"by_page": found.kept is None} if kept is not None else None
        costs = _costs(found.events, kept["recoveries"] if kept is not None else [])
        events = [self._event(event) | costs.get(number, {}) for number, event in enumerate(found.events)]
        document |= {"events": events[-EVENTS:], "events_kept": len(events)}
        if found.folder is not None:
            document["checkpoint"] = self._newest_checkpoint(found.folder, document)
        return document

    def _read_curve(self, folder: Path | None, document: dict[str, Any]) -> None:
        """Reads the table that the first pserver writes here; else takes what it reports, since this page began."""
        if not self._from_table and folder is not None and (folder / FILE).exists():
            self._curve, self._from_table = Curve(), True
        if self._from_table and folder is not None:
            self._curve.read(folder)
        elif document.get("loss") is not None:
            values = {"loss": document["loss"], **document.get("metrics", {})}
            steps, at = np.array([int(document["step"] or 0)]), np.array([time.time()])
            self._curve.add(tuple(values), steps, np.ones(1), np.array([list(values.values())]), at)
        source = {"source": "table" if self._from_table else "looks", "unread": plain_text(self._curve.unread)}
        document["curve"] = {**self._curve.to_json(), **source}
        validations = read_validations(folder).items() if folder is not None else ()
        document["validations"] = [{"step": step, "means": dict(row.metrics)} for step, row in validations]

    def _add_shares(self, document: dict[str, Any]) -> None:
        """Adds the shares of each trainer's time of late, and marks one for which the others wait."""
        now, trainers = time.monotonic(), document.get("trainers", ())
        self._splits.append((now, {t["id"]: t["seconds"] for t in trainers}))
        while len(self._splits) > 2 and now - self._splits[1][0] > SHARE_SECONDS:
            self._splits.popleft()
        for trainer in trainers:
            first = next(splits[trainer["id"]] for _, splits in self._splits if trainer["id"] in splits)
            spent = {what: max(0.0, s - first.get(what, 0.0)) for what, s in trainer["seconds"].items()}
            total = sum(spent.values())
            trainer["share"] = {what: round(s / total, 3) for what, s in spent.items()} if total else {}
        at_work = [t for t in trainers if t["share"] and t["share"].get("idle", 0.0) < 0.9]
        most = max((t["share"].get("shards", 0.0) for t in at_work), default=0.0)
        for trainer in at_work:
            trainer["straggler"] = most - trainer["share"].get("shards", 0.0) > STRAGGLES

    def _event(self, event: Event) -> dict[str, Any]:
        step = event.fields.get("step")
        return {
            "at": event.at,
            "who": event.who,
            "kind": event.kind,
            "text": event.text,
            "fault": event.kind in FAULTS,
            "step": step if isinstance(step, int) else self._curve.step_at(event.at),
        }

    def _newest_checkpoint(self, folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what its manifest says, which is read once."""
        step = document["checkpoint"]["step"] if "checkpoint" in document else document.get("step")
        if not step or self._checkpoint.get("step") == step:
            return self._checkpoint or {"step": step}
        newest = next((m for m in checkpoints_of(folder).manifests() if m.step <= step), None)
        if newest is None:
            return {"step": step}
        self._checkpoint = {
            "step": newest.step,
            "at": newest.meta.get("made", {}).get("at"),
            "bytes": newest.bytes,
            "shards": {str(part.shard): part.bytes for part in newest.parts},
        }
        return self._checkpoint


def _time(document: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where the time went, as a ledger has it (`TimeLedger.export`)."""
    seconds = {name: kept["seconds"].get(name, 0.0) for name in CATEGORIES}
    live = document.get("state") in ("running", "starting", "idle")
    return {
        "began": kept["began"],
        "until": kept["until"],
        "wall": round(sum(seconds.values()), 3),
        "seconds": seconds,
        "goodput": goodput_of(kept),
        "mode": kept["mode"] if live else "over",
        "steps_per_second": kept["pace"] if live else 0.0,
        "seconds_left": kept["left"] if live else None,
    }


def _costs(events: Sequence[Event], recoveries: Sequence[Sequence[Any]]) -> dict[int, dict[str, float]]:
    """Returns by the number of an event the seconds until a step was made again, and for which steps were computed
    again. Of several events of a recovery, the first one has it."""
    costs: dict[int, dict[str, float]] = {}
    for at, seconds, redone in recoveries:
        near = [n for n, e in enumerate(events) if at - BEFORE_SECONDS <= e.at <= at + seconds + AFTER_SECONDS]
        faults = [n for n in near if events[n].kind in FAULTS] or [n for n in near if events[n].kind in AFTER_FAULTS]
        if free := [n for n in faults if n not in costs]:
            costs[free[0]] = {"cost": round(seconds, 2), "redone": round(redone, 2)}
    return costs
