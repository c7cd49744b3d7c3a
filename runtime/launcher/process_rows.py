"""The processes of a job, a row each, as the panel shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from graphft.runtime.coordination.status import JobStatus

COLUMNS = ("role", "process", "at", "slots", "doing")
Row = tuple[str, str, str, str, str]
NARROW = 70
"""Columns of a terminal that a table does not fit into."""


@dataclass(frozen=True)
class Processes:
    """A table of them; on a terminal that is too narrow for it, lines."""

    status: JobStatus

    @property
    def rows(self) -> list[Row]:
        status = self.status
        return [*_pserver_rows(status), *_coordinator_rows(status), *_trainer_rows(status), *_loading_rows(status)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < NARROW:
            yield from (Text("  ".join(cell for cell in row if cell)) for row in self.rows)
            return
        table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
        for column in COLUMNS:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        yield table


def _pserver_rows(status: JobStatus) -> Iterator[Row]:
    for index, shard in status.pservers.items():
        at = f"version {shard.get('version', '-')}"
        yield f"pserver {index}", _where(status, "pserver", index, shard), at, "", _staleness(shard)


def _coordinator_rows(status: JobStatus) -> Iterator[Row]:
    for name, coordinator in status.coordinators.items():
        at = "serving" if coordinator["serving"] else "standing by"
        rate = f"{_rate(coordinator.get('tasks_per_second', 0))} tasks/s" * coordinator["serving"]
        yield f"coordinator {name}", _where(status, "coordinator", _index_in(name), coordinator), at, "", rate


def _trainer_rows(status: JobStatus) -> Iterator[Row]:
    for name, trainer in status.trainers.items():
        slots = ", ".join(str(v) for v, holder in status.slots.items() if holder == name)
        doing = trainer.get("waiting") or f"{trainer.get('samples_per_second', 0):,.0f} samples/s"
        if trainer.get("unreached") and not trainer.get("waiting"):
            doing = f"cannot reach {', '.join(trainer['unreached'])}"
        where = _where(status, "trainer", _index_in(name), trainer)
        yield f"trainer {name}", where, f"step {trainer.get('step', '-')}", slots, doing


def _loading_rows(status: JobStatus) -> Iterator[Row]:
    for name, process in status.loading.items():
        at = f"loading {process['what']}, {process['seconds']:.0f} s"
        yield f"{process['role']} {name}", f"{process['host']}:{process['pid']}", at, "", ""


def _where(status: JobStatus, role: str, index: int, process: Mapping[str, Any]) -> str:
    """Its host and pid, and what its engine calls the place."""
    place = status.place_of(role, index, process["pid"])
    return f"{process['host']}:{process['pid']}" + (f" {place}" if place not in ("", process["host"]) else "")


def _index_in(name: str) -> int:
    """Of a trainer's or coordinator's id: INDEX-UNIQUE."""
    index = name.rpartition("-")[0]
    return int(index) if index.isdecimal() else -1


def _rate(per_second: float) -> str:
    """With a digit more where few are not none."""
    return f"{per_second:,.0f}" if per_second >= 9.95 or not per_second else f"{per_second:.1f}"


def _staleness(shard: Mapping[str, Any]) -> str:
    """Async: how many versions behind the gradients are that the shard applies."""
    if not any(shard.get("staleness", ())):
        return ""
    return f"staleness {shard['staleness_mean']:.1f}, at most {shard['staleness_max']}"
