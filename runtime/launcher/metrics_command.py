"""`graphft metrics`: what a job's trainers noted of each batch, as JSON lines for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from graphft.errors import UsageError
from graphft.runtime.process.role_process import EXIT_OK
from graphft.sealed_json import encode_json

if TYPE_CHECKING:
    from graphft.runtime.process.metric_table import Table


def add_parser(commands: Any) -> None:
    metrics = commands.add_parser(
        "metrics", help="print the losses and metrics of a job, a line of JSON for each batch"
    )
    metrics.add_argument("--job", required=True, help="the job's name or folder")
    metrics.set_defaults(command=_show)


def _show(options: argparse.Namespace) -> int:
    """Raises UsageError where there is no such job, or nothing is noted here."""
    from graphft.runtime.coordination.runs import find_folder
    from graphft.runtime.launcher.tell import tell
    from graphft.runtime.process.metric_files import FOLDER, read_table

    folder = find_folder(options.job)
    table = read_table(folder)
    if not len(table):
        raise UsageError(
            "; ".join(table.unread) or f"no trainer has noted a batch in {folder / FOLDER}",
            rule="no-metrics",
            help="see whether you may read it" if table.unread else "trainers of other machines note theirs there",
        )
    for text in table.unread:
        tell(text)
    for row in _rows(table):
        print(encode_json(row).decode())
    return EXIT_OK


def _rows(table: Table) -> Iterator[dict[str, Any]]:
    columns = (table.step, table.slot, table.samples, table.at.round(3))
    names = [name for name in table.values if name != "loss"]
    for i, (step, slot, samples, at) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        metrics = {name: float(table.values[name][i]) for name in names if table.known[name][i]}
        loss = float(table.values["loss"][i])
        yield {"step": step, "slot": slot, "loss": loss, "metrics": metrics, "samples": samples, "at": at}
