"""`graphft status`, `graphft runs`, `graphft metrics`: a job, all of a folder or an etcd, the steps of one."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.disk.fileio import size_in_words
from graphft.disk.sealed_json import encode_json, readable_json
from graphft.errors import UsageError
from graphft.runtime.process.role_process import EXIT_OK

if TYPE_CHECKING:
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.status import JobStatus
    from graphft.runtime.etcd import Etcd
    from graphft.runtime.launcher.run_list import ListedRun
    from graphft.transpiler.criteria import Criterion

WATCH_SECONDS = 0.5


def add_parsers(commands: Any) -> None:
    status = commands.add_parser("status", help="what a job is doing; without --job, as graphft runs")
    which = "the job's name or folder, or the URL of its storage (default: list all in ./jobs)"
    status.add_argument("--job", default="", help=which)
    status.add_argument("--etcd", default="", help="host:port[,host:port...] (default: what the job's folder says)")
    status.add_argument("--watch", action="store_true", help="stay and update")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=show_status)

    runs = commands.add_parser("runs", help="the jobs in a folder: state, step, best metric, size, when")
    runs.add_argument("folder", nargs="?", metavar="FOLDER", default="jobs", help="a folder of jobs (default: ./jobs)")
    whose = "whose best value is told (default: that by which a job keeps its best model, or the loss)"
    runs.add_argument("--metric", metavar="NAME", help=whose)
    best = "which value is the best (default: min of a loss or an error, max of anything else)"
    runs.add_argument("--best", choices=("max", "min"), default=None, help=best)
    order = "in which order: the one worked on last, or the best one, at the end (default: when)"
    runs.add_argument("--sort", choices=("when", "best"), default="when", help=order)
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.set_defaults(command=_show_runs)

    metrics = commands.add_parser("metrics", help="print the loss and metrics of a job, a line of JSON for each step")
    metrics.add_argument("--job", required=True, help="the job's name or folder")
    metrics.set_defaults(command=_show_metrics)


# -- one job, or those of an etcd -------------------------------------------------------------------------------------


def show_status(options: argparse.Namespace) -> int:
    """Prints what was asked for. Raises GraphftError when there is no such job, or etcd does not answer."""
    from graphft.runtime.coordination.connect import connect
    from graphft.runtime.coordination.runs import JOBS, find_folder, run_folders

    if options.etcd:
        with connect(options.etcd) as etcd:
            _show_from_etcd(etcd, options)
    elif options.job:
        _show_folder(find_folder(options.job), options)
    else:
        _refuse_watch(options, list(map(str, run_folders())))
        options = argparse.Namespace(folder=str(JOBS), metric=None, best=None, sort="when", json=options.json)
        _show_runs(options)
    return EXIT_OK


def _show_from_etcd(etcd: Etcd, options: argparse.Namespace) -> None:
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.coordination.status import list_jobs, read_status

    names = [_name_of(options.job)] if options.job else list_jobs(etcd)
    if len(names) == 1:
        _show(etcd, Keys(names[0]), options)
        return
    if not names:
        raise UsageError("etcd knows no job", rule="unknown-job", help="start one; or see whether --etcd is right")
    _refuse_watch(options, names)
    found = [read_status(etcd, Keys(name), brief=True) for name in names]
    states = ["stopped" if status.idle else status.state for status in found]
    if options.json:
        rows = [s.in_brief(options.etcd) | {"state": state} for s, state in zip(found, states, strict=True)]
        print(readable_json(rows))
    else:
        _print_table([_row_of_etcd(s, state) for s, state in zip(found, states, strict=True)])


def _row_of_etcd(status: JobStatus, state: str) -> tuple[str, str, str, str]:
    waiting = f", waiting for {status.waiting}" if status.waiting else ""
    reached = str(status.step) if status.on_demand else f"{status.step} of {status.total_steps}"
    return status.job, state + waiting, reached, status.spec.get("folder", "")


def _refuse_watch(options: argparse.Namespace, known: list[str]) -> None:
    if options.watch:
        raise UsageError("--watch is for one job", rule="usage", help=f"give --job, one of {', '.join(known)}")


def _show_folder(folder: Path, options: argparse.Namespace) -> None:
    """Shows the whole status of a job that runs; of one that does not, what its folder tells."""
    from graphft.runtime.coordination.connect import connect
    from graphft.runtime.coordination.job_storage import is_url
    from graphft.runtime.coordination.keys import Keys
    from graphft.runtime.launcher.folder_status import look_at

    url = options.job.rstrip("/") if is_url(options.job) else ""
    status = look_at(folder)
    while options.watch and status.state == "starting":
        time.sleep(WATCH_SECONDS)
        status = look_at(folder)
    if status.state == "running":
        with connect(status.etcd) as etcd:
            _show(etcd, Keys(status.name), options)
        return
    status = dataclasses.replace(status, url=url)
    print(readable_json(status.to_json()) if options.json else status.describe())


def _show(etcd: Etcd, keys: Keys, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    from graphft.runtime.coordination.status import read_status
    from graphft.runtime.launcher.display import render
    from graphft.runtime.page.time_keeper import left_of, read_time

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
    from graphft.runtime.coordination.runs import JOBS, run_in
    from graphft.transpiler import read_record

    folder = run_in(job) or run_in(str(JOBS / job))
    return read_record(Path(folder or job)).config.name if folder or "/" in job else job


# -- those of a folder ------------------------------------------------------------------------------------------------


def _show_runs(options: argparse.Namespace) -> int:
    """Raises UsageError for a place without jobs, a metric that none of them has, and an order that makes no sense."""
    from graphft.runtime.launcher.run_list import list_runs
    from graphft.transpiler.criteria import Criterion

    found = list_runs(options.folder)
    wanted = None
    if options.metric or options.best:
        wanted = Criterion(options.metric or "loss", options.best or "")
        known = {"loss"}.union(*(run.validated for run in found))
        if wanted.metric not in known:
            raise UsageError(
                f"none of these jobs has a metric {wanted.metric!r}",
                rule="unknown-metric",
                help=f"there are {', '.join(sorted(known))}",
            )
    told = {run.criterion(wanted) for run in found}
    if options.sort == "best" and len(told) > 1:
        raise UsageError(
            f"these jobs tell their best by {', '.join(sorted({c.metric for c in told}))}: that is no order of them",
            rule="option",
            help="name one: --sort best --metric loss",
        )
    if options.sort == "best":
        found.sort(key=lambda run: run.goodness(wanted))
    if options.json:
        print(readable_json([run.to_json(wanted) for run in found]))
        return EXIT_OK
    metrics = {criterion.metric for criterion in told}
    _print_table([_header(metrics), *(_row(run, wanted, len(metrics) > 1) for run in found)])
    for run in found:
        for text in run.remarks():
            print(f"{run.status.row()[0]}: {text}")
    return EXIT_OK


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _header(metrics: Collection[str]) -> tuple[str, ...]:
    """`metrics`: whose best is told; of several, a row says which."""
    best = f"best {next(iter(metrics))}" if len(metrics) == 1 else "best"
    return ("folder", "state", "step", "loss", best, "size", "launches", "preempted", "failed", "worked on last")


def _row(run: ListedRun, wanted: Criterion | None, named: bool) -> tuple[str, ...]:
    ends, best = run.ends, run.best(wanted)
    name = f"{run.criterion(wanted).metric} " * named
    return (
        *run.status.row(),
        "-" if run.loss is None else f"{run.loss:.4g}",
        "-" if best is None else f"{name}{best[0]:.4g} (epoch {best[1]})",
        size_in_words(run.bytes),
        *map(str, (ends.launches, sum(ends.preemptions.values()), sum(ends.failures.values()))),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.status.at)),
    )


# -- each step --------------------------------------------------------------------------------------------------------


def _show_metrics(options: argparse.Namespace) -> int:
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
