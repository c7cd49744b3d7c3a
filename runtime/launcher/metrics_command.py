"""`graphft metrics`: loss and metrics of each step of a job, as JSON lines for other programs."""

from __future__ import annotations

import argparse
from typing import Any

from graphft.disk.sealed_json import encode_json
from graphft.errors import UsageError
from graphft.runtime.process.role_process import EXIT_OK


def add_parser(commands: Any) -> None:
    metrics = commands.add_parser("metrics", help="print the loss and metrics of a job, a line of JSON for each step")
    metrics.add_argument("--job", required=True, help="the job's name or folder")
    metrics.set_defaults(command=_show)


def _show(options: argparse.Namespace) -> int:
    """Raises UsageError where there is no such job, or nothing is recorded here."""
    from graphft.runtime.coordination.runs import find_folder
    from graphft.runtime.process.metric_table import FILE, rows_or_why

    folder = find_folder(options.job)
    rows, why = rows_or_why(folder)
    numbers, known = rows.known()
    if not len(known):
        raise UsageError(
            why or f"no step is recorded in {folder / FILE}",
            rule="no-metrics",
            help="see whether you may read it" if why else "its first pserver writes it, in the folder that it has",
        )
    columns = (numbers, known.data["step"], known.data["samples"], known.at.round(3), known.data["values"])
    for number, step, samples, at, values in zip(*(column.tolist() for column in columns), strict=True):
        named = dict(zip(rows.names, values, strict=True))
        print(encode_json({"row": number, "step": step, "samples": samples, "at": at, **named}).decode())
    return EXIT_OK
