"""The progress display: one live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from graphft.runtime.coordination.records import Event
from graphft.runtime.coordination.status import ETCD_FULL, JobStatus
from graphft.runtime.launcher.output import output_of
from graphft.runtime.protocol.time_ledger import in_words

LINE_EVERY_SECONDS = 5.0
EVENTS_SHOWN = 6
METRICS_SHOWN = 3
"""On a line; the panel has all."""
COLUMNS = ("role", "process", "at", "slots", "doing")


Row = tuple[str, str, str, str, str]


def format_line(status: JobStatus, left: float | None = None) -> str:
    """Returns a line that says where the job is. `left`: seconds that it will still take."""
    return f"{_progress(status, left, METRICS_SHOWN)}  {_live(status)}"


def _progress(status: JobStatus, left: float | None, shown: int | None) -> str:
    loss = f"{status.loss:.4f}" if status.loss is not None else "-"
    total = "" if status.on_demand else f"/{status.total_steps or '?'}"
    metrics = "".join(f"{name} {value:.4g}  " for name, value in list(status.metrics.items())[:shown])
    return (
        f"epoch {min(status.pass_index + 1, status.passes)}/{status.passes}  "
        f"step {status.step}{total}  loss {loss}  {metrics}"
        f"{status.samples_per_second:,.0f} samples/s"
        + (f"  {in_words(left)} left" if left else "")
        + (f"  {status.skipped_steps} steps SKIPPED as not finite" if status.skipped_steps else "")
        + (f"  validating step {', '.join(map(str, status.validating))}" if status.validating else "")
    )


def _facts(status: JobStatus) -> str:
    facts = [", ".join(f"{name} {rate:.4g}" for name, rate in status.learning_rates.items()) or "lr -"]
    if status.spec["ft"]:
        age = f", {in_words(status.checkpoint_age)} ago" if status.checkpoint_age is not None else ""
        saved = status.checkpoint is not None
        facts.append(f"checkpoint at step {status.checkpoint}{age}" if saved else "no checkpoint so far")
    if (folder := Path(status.spec.get("folder", ""))).name:
        here = Path.cwd()
        facts.append(f"folder {folder.relative_to(here) if folder.is_relative_to(here) else folder}")
    return "  ".join(facts)


def _validation(status: JobStatus) -> str:
    found = status.validated
    means = ", ".join(f"{name} {float(mean):.6g}" for name, mean in found.means.items()) if found is not None else ""
    return f"validation of step {found.step}: {means or 'NOT MADE'}" if found is not None else ""


def _live(status: JobStatus) -> str:
    spec, free = status.spec, 0
    parts = [f"{len(status.trainers)} trainers"]
    parts[0] += f" ({len(status.loading)} more loading)" if status.loading else ""
    parts.append(f"{len(status.pservers)}/{spec['pservers']} pservers")
    if without := sum(map(len, status.without_room.values())):
        parts.append(f"{without} wait for room")
    if not spec["ft"]:
        return "  ".join([*parts, "(no fault tolerance)"])
    if status.has_coordinator:
        parts.append("WAITING for a coordinator" if status.waiting else f"{len(status.coordinators)} coordinators")
    if spec["sync"] and status.trainers:
        free = spec["trainers"] - len(status.slots)
    if free:
        parts.append(f"{free} of {spec['trainers']} slots wait for a trainer")
    parts.append("chunks " + (" ".join(f"{n} {name}" for name, n in status.queue.items()) or "not counted"))
    if discarded := sum(len(found.discards) for found in status.discarded.values()):
        parts.append(f"{discarded} batches DISCARDED")
    return "  ".join(parts)


def render(status: JobStatus, left: float | None = None) -> Group:
    head = Text(f"graphft job {status.job}: {status.told}, generation {status.generation}", style="bold")
    failed = [Text(text, style="bold red") for text in (status.failure, ETCD_FULL * status.etcd_full) if text]
    bar = ProgressBar(total=status.total_steps or None, completed=status.step, width=60)
    events = [Text(format_event(e), style="yellow") for e in status.events[-EVENTS_SHOWN:]]
    rooms = [Text(f"{', '.join(names)}: {place}", style="red") for place, names in status.without_room.items()]
    # A progress bar ends without a line break.
    texts = [_progress(status, left, None), _facts(status), _validation(status), _live(status)]
    lines = [Text(text) for text in texts if text]
    return Group(head, *failed, *lines, bar, Text(), _processes(status), *rooms, *events)


def format_event(event: Event) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))} [{event.who}] {event.text}"


def _processes(status: JobStatus) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in process_rows(status):
        table.add_row(*row)
    return table


def process_rows(status: JobStatus) -> Iterator[Row]:
    for index, shard in status.pservers.items():
        at = f"version {shard.get('version', '-')}"
        yield f"pserver {index}", _where(status, "pserver", index, shard), at, "", _staleness(shard)
    for name, coordinator in status.coordinators.items():
        at = "serving" if coordinator["serving"] else "standing by"
        yield f"coordinator {name}", _where(status, "coordinator", _index_in(name), coordinator), at, "", ""
    for name, trainer in status.trainers.items():
        slots = ", ".join(str(v) for v, holder in status.slots.items() if holder == name)
        doing = trainer.get("waiting") or f"{trainer.get('samples_per_second', 0):,.0f} samples/s"
        if trainer.get("unreached") and not trainer.get("waiting"):
            doing = f"cannot reach {', '.join(trainer['unreached'])}"
        where = _where(status, "trainer", _index_in(name), trainer)
        yield f"trainer {name}", where, f"step {trainer.get('step', '-')}", slots, doing
    for name, process in status.loading.items():
        at = f"loading {process['what']}, {process['seconds']:.0f} s"
        yield f"{process['role']} {name}", f"{process['host']}:{process['pid']}", at, "", ""


def _where(status: JobStatus, role: str, index: int, process: Mapping[str, Any]) -> str:
    wanted = {"role": role, "index": index, "pid": process["pid"]}
    place = next((p["place"] for p in status.places if p.items() >= wanted.items()), "")
    return f"{process['host']}:{process['pid']}" + (f" {place}" if place not in ("", process["host"]) else "")


def _index_in(name: str) -> int:
    index = name.rpartition("-")[0]
    return int(index) if index.isdecimal() else -1


def _staleness(shard: Mapping[str, Any]) -> str:
    if not any(shard.get("staleness", ())):
        return ""
    return f"staleness {shard['staleness_mean']:.1f}, at most {shard['staleness_max']}"


class Display:
    """Shows statuses as they come: on a terminal in a live panel, else by a line each 5 s, and each event once. Events
    from before `since` (Unix seconds) are not shown."""

    def __init__(self, stream: TextIO | None = None, since: float | None = None) -> None:
        # Texts of events are not ours to mark up: "[pserver 0]" would be taken for a style.
        self.console = Console(file=output_of(stream or sys.stdout), highlight=False, markup=False, emoji=False)
        self._panel = None
        if self.console.is_terminal:
            self._panel = Live(console=self.console, refresh_per_second=4, transient=True)
            self._panel.start()
        self._since = time.time() if since is None else since
        self._shown: set[tuple[float, str]] = set()
        self._next_line = 0.0

    def show(self, status: JobStatus, left: float | None = None) -> None:
        if self._panel is not None:
            events = [event for event in status.events if event.at >= self._since]
            self._panel.update(render(dataclasses.replace(status, events=events), left))
            return
        self._new_events(status)
        if time.monotonic() >= self._next_line and status.state != "complete":
            self._next_line = time.monotonic() + LINE_EVERY_SECONDS
            self._line(status, left)

    def close(self, status: JobStatus | None = None) -> None:
        """Leaves the events on the screen, and where the job was if it is not complete. Repeatable."""
        if self._panel is not None:
            self._panel.stop()
        if status is not None:
            self._new_events(status)
            if status.state != "complete":  # its roles have left: no loss, and no one to count
                self._line(status)

    def _line(self, status: JobStatus, left: float | None = None) -> None:
        self.console.print(format_line(status, left), soft_wrap=True)

    def _new_events(self, status: JobStatus) -> None:
        for event in status.events:
            if event.at >= self._since and (event.at, event.text) not in self._shown:
                self._shown.add((event.at, event.text))
                self.console.print(format_event(event), soft_wrap=True)
