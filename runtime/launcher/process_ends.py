"""Keeps what became of a run's processes: `ends.jsonl` in its folder, which outlives the launchers that write it.

A line: {at (seconds since 1970), kind, name, what}. `kind`: "failure" or "preemption" of the process `name` ("trainer
0"); "launch"; "failed": the job; "saved": there was a checkpoint.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.disk.fileio import read_regular
from graphft.disk.sealed_json import parse_json
from graphft.errors import plain_text
from graphft.runtime.coordination.records import Event, PassMetrics
from graphft.runtime.launcher.ending import tell

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig

log = logging.getLogger("graphft")

FILE = "ends.jsonl"


@dataclass(frozen=True)
class ProcessEnds:
    """How many processes of each role failed, and how many were preempted, since a run's first launch. `failed`: why
    the job did, in the last launch."""

    launches: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    failed: str = ""
    """Why the job failed in the last launch, if it did."""


def note(job_dir: Path, kind: str, what: str = "", name: str = "") -> bool:
    """Appends a line. Returns False if the disk did not take it: a full one must not end a launcher."""
    try:
        with (job_dir / FILE).open("a") as f:
            f.write(json.dumps({"at": round(time.time(), 3), "kind": kind, "name": name, "what": what}) + "\n")
    except OSError as error:
        log.warning("the end of a process cannot be noted in %s: %s", job_dir, error)
        return False
    return True


def _rows(job_dir: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of these kinds; not those that the disk did not take whole."""
    try:
        lines = read_regular(job_dir / FILE).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = parse_json(line)
            row = {"at": float(row["at"])} | {key: str(row[key]) for key in ("kind", "name", "what")}
        except (ValueError, KeyError, TypeError):
            continue
        if row["kind"] in kinds:
            yield row


def read_ends(job_dir: Path) -> ProcessEnds:
    counts = {kind: Counter(row["name"] for row in _rows(job_dir, kind)) for kind in ("failure", "preemption")}
    jobs = list(_rows(job_dir, "launch", "failed"))
    launches = sum(row["kind"] == "launch" for row in jobs)
    failed = jobs[-1]["what"] if jobs else ""
    return ProcessEnds(launches, dict(counts["failure"]), dict(counts["preemption"]), failed)


def note_saved(job_dir: Path, step: int) -> None:
    """Notes, once, that there is a checkpoint: a run without any never begins anew in silence then."""
    if not was_saved(job_dir):
        note(job_dir, "saved", str(step))


def was_saved(job_dir: Path) -> bool:
    return any(_rows(job_dir, "saved"))


def lost_checkpoints(job_dir: Path, step: int | None) -> str:
    """Returns what is wrong with the checkpoints of a run that would go on at `step`, as a verb of theirs; "" if
    nothing is."""
    if step is None:
        return "cannot be read now"
    return "are gone, or damaged" if step == 0 and was_saved(job_dir) else ""


def past_epoch(config: JobConfig, job_dir: Path, epoch: int, found: PassMetrics) -> dict[str, float]:
    """Returns what `on_epoch` is given of an epoch (from 1) for whose end nobody has waited, as `train()` returns it.
    `seconds`: from its first step to its last one."""
    starts, within = config.plan.start_steps, (found.began, found.ended)
    ends = [row["kind"] for row in _rows(job_dir, "failure", "preemption") if within[0] <= row["at"] <= within[1]]
    return {
        "epoch": epoch,
        **found.numbers(),
        "discarded": discarded_in(config, epoch, found),
        "steps": starts[epoch] - starts[epoch - 1],
        "seconds": found.ended - found.began,
        "failures": ends.count("failure"),
        "preemptions": ends.count("preemption"),
    }


def discarded_in(config: JobConfig, epoch: int, found: PassMetrics) -> int:
    """Returns how many records of an epoch (from 1) were discarded; where rows are lacking, nobody knows."""
    if found.lacking:
        tell(f"of epoch {epoch}, the metrics of {found.lacking} steps are lost: it is told without them")
        return 0
    return config.plan.samples - found.samples


def ends_as_events(job_dir: Path) -> list[Event]:
    found = []
    for row in _rows(job_dir, "launch", "failed", "failure", "preemption"):
        what, kind = plain_text(row["what"]), {"launch": "launch", "failed": "failed"}.get(row["kind"], "died")
        text = {"launch": "the job was launched", "failed": what, "died": f"{row['name']} died ({what})"}[kind]
        found.append(Event(row["at"], "launcher", kind, text))
    return found
