"""Keeps what became of a run's processes: `ends.jsonl` in its folder, which outlives the launchers that write it.

A line: {at (seconds since 1970), name ("trainer 0"), kind ("failure" or "preemption"), what}; {at, kind: "launch"}; or
{at, kind: "failed", what}: the job did;
or {at, kind: "saved", what}: there was a checkpoint, of this step.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graphft.disk.fileio import read_regular
from graphft.disk.sealed_json import parse_json
from graphft.errors import GraphftError, plain_text
from graphft.runtime.coordination.job_storage import put_mark, read_mark, storage_of
from graphft.runtime.coordination.records import Event, PassMetrics
from graphft.runtime.launcher.tell import tell
from graphft.transpiler.record import read_record

if TYPE_CHECKING:
    from graphft.transpiler import JobConfig

log = logging.getLogger("graphft")

FILE = "ends.jsonl"
SAVED = "saved.json"
"""In a run's storage."""
Kind = Literal["failure", "preemption"]


@dataclass(frozen=True)
class ProcessEnds:
    """Of a run, from its first launch on: how many processes of each role failed, and how many were preempted."""

    launches: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    failed: str = ""
    """Why the job failed in the last launch, if it did."""
    saved: bool = False
    """Whether a checkpoint is known to have been there."""


def note_launch(job_dir: Path) -> None:
    _append(job_dir, {"kind": "launch"})


def note_end(job_dir: Path, name: str, kind: Kind, what: str) -> None:
    """A process of this role ended before its job did. Never raises: a full disk must not end a launcher."""
    _append(job_dir, {"kind": kind, "name": name, "what": what})


def note_failed(job_dir: Path, why: str) -> None:
    """The job itself has failed."""
    _append(job_dir, {"kind": "failed", "what": why})


def note_saved(job_dir: Path, step: int) -> bool:
    """A Trainer, or who launches its run, has seen a checkpoint of this step: nothing is written if that is noted
    already. Where the run has a storage, machines without its folder are to know it, too. Returns whether it is noted
    now. Never raises."""
    noted = read_ends(job_dir).saved or _append(job_dir, {"kind": "saved", "what": str(step)})
    try:
        if (url := storage_of(job_dir)) and not _is_marked(job_dir, url):
            put_mark(url, SAVED, json.dumps({"run": read_record(job_dir).run_id, "step": step}).encode())
    except GraphftError as error:
        log.warning("that there is a checkpoint cannot be noted in the storage of %s: %s", job_dir, error.message)
        return False
    return noted


def was_saved(job_dir: Path) -> bool:
    """Whether there was a checkpoint, as `note_saved` was told. Raises GraphftError[storage]."""
    if read_ends(job_dir).saved:
        return True
    url = storage_of(job_dir)
    return bool(url) and _is_marked(job_dir, url)


def lost_checkpoints(job_dir: Path, step: int | None) -> str:
    """What is wrong with the checkpoints of a run that would go on at `step` (`saved_step`), as a verb of theirs; "" if
    nothing is. Raises GraphftError[storage]."""
    if step is None:
        return "cannot be read now"
    return "are gone, or damaged" if step == 0 and was_saved(job_dir) else ""


def _is_marked(job_dir: Path, url: str) -> bool:
    try:
        return bool(parse_json(read_mark(url, SAVED) or b"{}").get("run") == read_record(job_dir).run_id)
    except (ValueError, AttributeError):
        return True  # it cannot be told of which run it is


def read_ends(job_dir: Path) -> ProcessEnds:
    """Of all launches of the run in this folder, on all machines that share it."""
    failed, launches, saved, counts = "", 0, False, {"failure": Counter[str](), "preemption": Counter[str]()}
    for line in _lines(job_dir):
        try:
            row = parse_json(line)
            kind = row["kind"]
            launches += kind == "launch"
            saved |= kind == "saved"
            failed = {"launch": "", "failed": str(row.get("what", ""))}.get(kind, failed)
            if kind in counts:
                counts[kind][str(row["name"])] += 1
        except (ValueError, KeyError, TypeError):  # a line that the disk did not take whole
            continue
    return ProcessEnds(launches, dict(counts["failure"]), dict(counts["preemption"]), failed, saved)


def count_ends(job_dir: Path, since: float, until: float) -> tuple[int, int]:
    """(failures, preemptions) of a run's processes between two times, Unix seconds, as far as they are noted."""
    counts = Counter[str]()
    for line in _lines(job_dir):
        try:
            row = parse_json(line)
            counts[str(row["kind"])] += since <= float(row["at"]) <= until
        except (ValueError, KeyError, TypeError):  # as above
            continue
    return counts["failure"], counts["preemption"]


def past_epoch(config: JobConfig, job_dir: Path, epoch: int, found: PassMetrics) -> dict[str, float]:
    """Returns what `on_epoch` is given of an epoch (from 1) for whose end nobody has waited: as `train()` returns it.
    `seconds`: from its first step to its last one, in which the `failures` and `preemptions` were."""
    starts = config.plan.start_steps
    failures, preemptions = count_ends(job_dir, found.began, found.ended)
    return {
        "epoch": epoch,
        **found.numbers(),
        "discarded": discarded_in(config, epoch, found),
        "steps": starts[epoch] - starts[epoch - 1],
        "seconds": found.ended - found.began,
        "failures": failures,
        "preemptions": preemptions,
    }


def discarded_in(config: JobConfig, epoch: int, found: PassMetrics) -> int:
    """Returns how many records of an epoch (from 1) were discarded. Where rows are lacking, a line says so: then nobody
    knows."""
    if found.lacking:
        tell(f"of epoch {epoch}, the metrics of {found.lacking} steps are lost: it is told without them")
        return 0
    return config.plan.samples - found.samples


def ends_as_events(job_dir: Path) -> list[Event]:
    """For a job whose etcd has gone: each launch, each process that ended too early, and that the job failed."""
    found = []
    for line in _lines(job_dir):
        try:
            row = parse_json(line)
            at, kind, what = float(row["at"]), row["kind"], plain_text(str(row.get("what", "")))
            text = {
                "launch": "the job was launched",
                "failed": what,
                "failure": f"{row.get('name')} died ({what})",
                "preemption": f"{row.get('name')} died ({what})",
            }.get(kind)
        except (ValueError, KeyError, TypeError):
            continue
        if text is not None:
            found.append(Event(at, "launcher", {"launch": "launch", "failed": "failed"}.get(kind, "died"), text))
    return found


def _append(job_dir: Path, row: dict[str, str]) -> bool:
    """Returns whether the disk took it."""
    try:
        with (job_dir / FILE).open("a") as f:
            f.write(json.dumps({"at": round(time.time(), 3)} | row) + "\n")
    except OSError as error:
        log.warning("the end of a process cannot be noted in %s: %s", job_dir, error)
        return False
    return True


def _lines(job_dir: Path) -> list[str]:
    try:
        return read_regular(job_dir / FILE).decode(errors="replace").splitlines()
    except OSError:
        return []
