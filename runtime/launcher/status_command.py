"""`graphft status`, `graphft runs`: a job, all of a folder or an etcd."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from graphft.disk.fileio import size_in_words
from graphft.disk.sealed_json import readable_json
from graphft.errors import UsageError
from graphft.runtime.coordination.connect import connect
from graphft.runtime.coordination.job_files import JOBS, is_url
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.runs import find_folder, run_folders, run_in
from graphft.runtime.coordination.status import JobStatus, list_jobs, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.launcher.display import render
from graphft.runtime.launcher.folder_status import ListedRun, list_runs, look_at
from graphft.runtime.page.time_keeper import left_of, read_time
from graphft.runtime.process.role_process import EXIT_OK
from graphft.transpiler.record import read_record

WATCH_SECONDS = 0.5
HEADER = ("folder", "state", "step", "loss", "best", "size", "launches", "preempted", "failed", "worked on last")


def add_parsers(commands: Any) -> None:
    status = commands.add_parser("status", help="what a job is doing; without --job, as graphft runs")
    which = "the job's name or folder, or the URL of its storage (default: list all in ./jobs)"
    status.add_argument("--job", default="", help=which)
    status.add_argument("--etcd", default="", help="host:port[,host:port...] (default: what the job's folder says)")
    status.add_argument("--watch", action="store_true", help="stay and update")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=_show_status, folder=str(JOBS))

    runs = commands.add_parser("runs", help="the jobs in a folder: state, step, best metric, size, when")
    runs.add_argument("folder", nargs="?", metavar="FOLDER", default=str(JOBS), help="a folder of jobs (default: jobs)")
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.set_defaults(command=_show_runs)


# -- one job, or those of an etcd -------------------------------------------------------------------------------------


def _show_status(options: argparse.Namespace) -> int:
    """Raises GraphftError when there is no such job, or etcd does not answer."""
    if options.etcd:
        with connect(options.etcd) as etcd:
            _show_from_etcd(etcd, options)
    elif options.job:
        _show_folder(find_folder(options.job), options)
    else:
        _refuse_watch(options, list(map(str, run_folders())))
        _show_runs(options)
    return EXIT_OK


def _show_from_etcd(etcd: Etcd, options: argparse.Namespace) -> None:
    names = [_name_of(options.job)] if options.job else list_jobs(etcd)
    if len(names) == 1:
        _show(etcd, Keys(names[0]), options)
        return
    if not names:
        raise UsageError("etcd knows no job", rule="unknown-job", help="start one; or see whether --etcd is right")
    _refuse_watch(options, names)
    found = [read_status(etcd, Keys(name), brief=True) for name in names]
    rows = [s.in_brief(options.etcd) | {"state": "stopped" if s.idle else s.state} for s in found]
    if options.json:
        print(readable_json(rows))
    else:
        _print_table([_row_of_etcd(row) for row in rows])


def _row_of_etcd(row: dict[str, Any]) -> tuple[str, str, str, str]:
    waiting = f", waiting for {row['waiting']}" if row["waiting"] else ""
    reached = str(row["step"]) if row["total_steps"] is None else f"{row['step']} of {row['total_steps']}"
    return row["job"], row["state"] + waiting, reached, row["folder"]


def _refuse_watch(options: argparse.Namespace, known: list[str]) -> None:
    if options.watch:
        raise UsageError("--watch is for one job", rule="usage", help=f"give --job, one of {', '.join(known)}")


def _show_folder(folder: Path, options: argparse.Namespace) -> None:
    """Shows the whole status of a job that runs; of one that does not, what its folder tells."""
    status = look_at(folder)
    while options.watch and status.state == "starting":
        time.sleep(WATCH_SECONDS)
        status = look_at(folder)
    if status.state == "running":
        with connect(status.etcd) as etcd:
            _show(etcd, Keys(status.name), options)
        return
    status = dataclasses.replace(status, url=options.job.rstrip("/") if is_url(options.job) else "")
    print(readable_json(status.to_json()) if options.json else status.describe())


def _show(etcd: Etcd, keys: Keys, options: argparse.Namespace) -> None:
    def left(status: JobStatus) -> float | None:
        folder = Path(str(status.spec.get("folder", "")))
        return left_of(read_time(folder, str(status.spec.get("run", ""))), status)

    status = dataclasses.replace(read_status(etcd, keys), etcd_full=etcd.is_full())
    if options.json:
        print(status.to_json(",".join(etcd.endpoints), left(status)))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if options.watch:
        with Live(console=console, transient=True) as panel:
            while (status := read_status(etcd, keys)).state == "running":
                panel.update(render(status, left(status)))
                time.sleep(WATCH_SECONDS)
    console.print(render(status, left(status)))


def _name_of(job: str) -> str:
    """Returns the name that `--job` means beside `--etcd`: itself, or that of the job in the folder."""
    folder = run_in(job) or run_in(str(JOBS / job))
    return read_record(Path(folder or job)).config.name if folder or "/" in job else job


# -- those of a folder ------------------------------------------------------------------------------------------------


def _show_runs(options: argparse.Namespace) -> int:
    """Raises UsageError for a place without jobs."""
    found = list_runs(options.folder)
    if options.json:
        print(readable_json([run.to_json() for run in found]))
        return EXIT_OK
    _print_table([HEADER, *map(_row, found)])
    for run in found:
        for text in run.remarks():
            print(f"{run.status.row()[0]}: {text}")
    return EXIT_OK


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(run: ListedRun) -> tuple[str, ...]:
    ends, best = run.ends, run.best
    return (
        *run.status.row(),
        "-" if run.loss is None else f"{run.loss:.4g}",
        "-" if best is None else f"{run.criterion.metric} {best[0]:.4g} (epoch {best[1]})",
        size_in_words(run.bytes),
        *map(str, (ends.launches, sum(ends.preemptions.values()), sum(ends.failures.values()))),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.status.at)),
    )
