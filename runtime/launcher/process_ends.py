"""Keeps what became of a run's processes: `ends.jsonl` in its folder, which outlives the launchers that write it.

A line: {at (seconds since 1970), kind, name, what}. `kind`: "failure" or "preemption" of the process `name` ("trainer
0"); "launch"; "failed": the job; "saved": there was a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from graphft.errors import plain_text
from graphft.runtime.coordination.records import Event, PassMetrics
from graphft.runtime.launcher.ending import tell

if TYPE_CHECKING:
    from graphft.transpiler.config import JobConfig

log = logging.getLogger("graphft")

FILE = "ends.jsonl"


@dataclass(frozen=True)
class ProcessEnds:
    """Counts processes of each role that failed, and that were preempted, since a run's first launch. `failed`: why
    the job did, in the last launch."""

    launches: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    failed: str = ""


class _End(msgspec.Struct):
    at: float
    kind: str
    name: str
    what: str


def note(job_dir: Path, kind: str, what: str = "", name: str = "") -> bool:
    """Appends a line. Returns False if the disk did not take it: a full one must not end a launcher."""
    try:
        with (job_dir / FILE).open("ab") as f:
            f.write(msgspec.json.encode(_End(round(time.time(), 3), kind, name, plain_text(what))) + b"\n")
    except OSError as error:
        log.warning("the end of a process cannot be noted in %s: %s", job_dir, error)
        return False
    return True


def _ends(job_dir: Path, *kinds: str) -> Iterator[_End]:
    """Yields the lines of these kinds; not those that the disk did not take whole."""
    with contextlib.suppress(OSError):
        for line in (job_dir / FILE).read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                end = msgspec.json.decode(line, type=_End)
                if end.kind in kinds:
                    yield end


def read_ends(job_dir: Path) -> ProcessEnds:
    counts = {kind: Counter(end.name for end in _ends(job_dir, kind)) for kind in ("failure", "preemption")}
    jobs = list(_ends(job_dir, "launch", "failed"))
    launches = sum(end.kind == "launch" for end in jobs)
    failed = jobs[-1].what if jobs else ""
    return ProcessEnds(launches, dict(counts["failure"]), dict(counts["preemption"]), failed)


def note_saved(job_dir: Path, step: int) -> None:
    """Notes, once, that there is a checkpoint: a run without any never begins anew in silence then."""
    if not was_saved(job_dir):
        note(job_dir, "saved", str(step))


def was_saved(job_dir: Path) -> bool:
    return any(_ends(job_dir, "saved"))


def lost_checkpoints(job_dir: Path, step: int | None) -> str:
    """Returns what is wrong with the checkpoints of a run that would go on at `step`, as a verb of theirs; "" if
    nothing is."""
    if step is None:
        return "cannot be read now"
    return "are gone, or damaged" if step == 0 and was_saved(job_dir) else ""


def past_epoch(config: JobConfig, job_dir: Path, epoch: int, found: PassMetrics) -> dict[str, float]:
    """Returns what `on_epoch` is given of an epoch (from 1) for whose end nobody has waited, as `train()` returns it.
    `seconds`: from its first step to its last one."""
    starts, ends = config.plan.start_steps, _ends(job_dir, "failure", "preemption")
    kinds = [end.kind for end in ends if found.began <= end.at <= found.ended]
    return {
        "epoch": epoch,
        **found.numbers(),
        "discarded": discarded_in(config, epoch, found),
        "steps": starts[epoch] - starts[epoch - 1],
        "seconds": found.ended - found.began,
        "failures": kinds.count("failure"),
        "preemptions": kinds.count("preemption"),
    }


def discarded_in(config: JobConfig, epoch: int, found: PassMetrics) -> int:
    """Returns how many records of an epoch (from 1) were discarded; where rows are lacking, nobody knows."""
    if found.lacking:
        tell(f"of epoch {epoch}, the metrics of {found.lacking} steps are lost: it is told without them")
        return 0
    return config.plan.samples - found.samples


def ends_as_events(job_dir: Path) -> list[Event]:
    found = []
    for end in _ends(job_dir, "launch", "failed", "failure", "preemption"):
        text = {"launch": "the job was launched", "failed": end.what}.get(end.kind, f"{end.name} died ({end.what})")
        kind = end.kind if end.kind in ("launch", "failed") else "died"
        found.append(Event(end.at, "launcher", kind, text))
    return found
