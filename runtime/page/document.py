"""All that the page shows of a job, as one JSON document: made of what etcd, its folder and its launcher tell.

`/status.json` is this document; the page and `/metrics` are made of it, and of nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from graphft.disk.sealed_json import encode_json
from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.status import JobStatus
from graphft.runtime.protocol.time_ledger import CATEGORIES, goodput_of

EVENTS = 100
"""So many are shown, the newest."""
FAULTS = frozenset(
    {
        "barred",
        "damaged-checkpoint",
        "died",
        "etcd-restarted",
        "failed",
        "hung",
        "discarded",
        "nonfinite",
        "rollback",
        "step-failed",
        "storage-unavailable",
        "storage-wait",
    }
)
"""Kinds of events that are marked on the curves."""
AFTER_FAULTS = ("takeover", "restarted")
"""Kinds that tell of a fault where no launcher does: a scheduler's processes."""
BEFORE_SECONDS, AFTER_SECONDS = 3.0, 1.0
"""An event belongs to a recovery that was seen to begin so long after it, or before: looks are apart, and so are the
clocks of machines."""
STRAGGLES = 0.15
"""A trainer is a straggler when it waits for the others by so much of its time less than they do for it."""


def at_rest(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of a job that does not run: `told` by its folder (`FolderStatus.to_json`)."""
    return dict(told)


def running(status: JobStatus, etcd: str) -> dict[str, Any]:
    """Of a job that etcd tells of, at the endpoints `etcd`."""
    return {
        **status.in_brief(etcd),
        "state": status.state if not status.idle else "idle",
        "metrics": status.metrics,
        "learning_rates": status.learning_rates,
        "samples_per_second": status.samples_per_second,
        "skipped_steps": status.skipped_steps,
        "generation": status.generation,
        "sync": bool(status.spec.get("sync")),
        "slots": _slots(status),
        "trainers": _trainers(status),
        "shards": _shards(status),
        "shards_wanted": int(status.spec.get("pservers", 0)),
        "coordinators": [
            {"name": name, "host": told["host"], "pid": told["pid"], "serving": told["serving"]}
            for name, told in status.coordinators.items()
        ],
        "loading": [
            {"name": name, "role": told["role"], "what": told["what"], "seconds": round(told["seconds"], 1)}
            for name, told in status.loading.items()
        ],
        "without_room": status.without_room,
        "queue": status.queue,
        "discarded": sum(len(found.discards) for found in status.discarded.values()),
        "checkpoint": {"step": status.checkpoint},
        "etcd_full": status.etcd_full,
        "validated": _validated(status),
        "validating": status.validating,
    }


def _validated(status: JobStatus) -> dict[str, Any] | None:
    """What the newest validation came to."""
    found = status.validated
    if found is None:
        return None
    means = {name: float(mean) for name, mean in found.means.items()}
    return {"step": found.step, "epoch": found.epoch, "means": means}


def _slots(status: JobStatus) -> list[dict[str, Any]]:
    if not (status.spec.get("sync") and status.spec.get("ft")):
        return []
    return [{"slot": slot, "trainer": status.slots.get(slot, "")} for slot in range(int(status.spec["trainers"]))]


def _trainers(status: JobStatus) -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "host": told["host"],
            "pid": told["pid"],
            "step": told.get("step"),
            "slots": [slot for slot, holder in status.slots.items() if holder == name],
            "samples_per_second": told.get("samples_per_second", 0.0),
            "seconds": told.get("seconds", {}),
            "waiting": told.get("waiting", ""),
            "unreached": told.get("unreached", []),
            "straggler": False,
        }
        for name, told in status.trainers.items()
    ]


def _shards(status: JobStatus) -> list[dict[str, Any]]:
    return [
        {
            "shard": index,
            "host": told["host"],
            "pid": told["pid"],
            "version": told.get("version"),
            "per_second": told.get("rounds_per_second", 0.0),
            "staleness": told.get("staleness", []),
            "staleness_mean": told.get("staleness_mean", 0.0),
            "staleness_max": told.get("staleness_max", 0),
        }
        for index, told in status.pservers.items()
    ]


def with_shares(document: dict[str, Any], shares: Mapping[str, Mapping[str, float]]) -> None:
    """`shares`: of each trainer's time of late, by what it was at. A trainer for which the others wait is told."""
    at_work = {name: share.get("shards", 0.0) for name, share in shares.items() if share.get("idle", 0.0) < 0.9}
    most = max(at_work.values(), default=0.0)
    for trainer in document.get("trainers", ()):
        trainer["share"] = {name: round(part, 3) for name, part in shares.get(trainer["id"], {}).items()}
        trainer["straggler"] = most - at_work.get(trainer["id"], most) > STRAGGLES


def with_time(document: dict[str, Any], kept: Mapping[str, Any] | None, by_page: bool = False) -> None:
    """Where the time went, as the launcher's ledger has it (`TimeLedger.export`), or the page's own (`by_page`); None:
    nobody has kept it."""
    if kept is None:
        document["time"] = None
        return
    seconds = {name: kept["seconds"].get(name, 0.0) for name in CATEGORIES}
    wall = sum(seconds.values())
    live = document.get("state") in ("running", "starting", "idle")
    document["time"] = {
        "by_page": by_page,
        "began": kept["began"],
        "until": kept["until"],
        "wall": round(wall, 3),
        "seconds": seconds,
        "goodput": goodput_of(kept),
        "mode": kept["mode"] if live else "over",
        "steps_per_second": kept["pace"] if live else 0.0,
        "seconds_left": kept["left"] if live else None,
        "high": kept["high"],
    }


def with_events(
    document: dict[str, Any], events: Sequence[Event], kept: Mapping[str, Any] | None, step_at: Any
) -> None:
    """Events, the newest last, with what those cost that a recovery belongs to. `step_at`: the step at a time."""
    costs = _costs(events, kept["recoveries"] if kept is not None else [])
    document["events"] = [
        {
            "at": event.at,
            "who": event.who,
            "kind": event.kind,
            "text": event.text,
            "fault": event.kind in FAULTS,
            "step": event.fields.get("step") if isinstance(event.fields.get("step"), int) else step_at(event.at),
            **costs.get(number, {}),
        }
        for number, event in enumerate(events)
    ][-EVENTS:]
    document["events_kept"] = len(events)


def _costs(events: Sequence[Event], recoveries: Sequence[Sequence[Any]]) -> dict[int, dict[str, float]]:
    """By the number of an event: seconds until a step was made again, and for which steps were computed again. Of
    several events of a recovery, the first one has it."""
    costs: dict[int, dict[str, float]] = {}
    for at, _, seconds, redone, _ in recoveries:
        near = [n for n, e in enumerate(events) if at - BEFORE_SECONDS <= e.at <= at + seconds + AFTER_SECONDS]
        faults = [n for n in near if events[n].kind in FAULTS] or [n for n in near if events[n].kind in AFTER_FAULTS]
        if free := [n for n in faults if n not in costs]:
            costs[free[0]] = {"cost": round(seconds, 2), "redone": round(redone, 2)}
    return costs


def to_json(document: Mapping[str, Any]) -> bytes:
    """What is no number (a loss that is infinite) is null; what is no text (a folder's name) has escapes."""
    return encode_json({**document, "now": time.time()})
