"""The commands `graphft status`, `runs`, `etcd`, `clean` and `page`: their options, and all but the last themselves."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from graphft.disk.fileio import remove_folder, size_in_words
from graphft.disk.sealed_json import readable_json
from graphft.errors import GraphftError, UsageError, describe
from graphft.runtime.checkpoint.store import FOLDER
from graphft.runtime.coordination.connect import connect
from graphft.runtime.coordination.job_files import JOBS, RUNS, is_url, url_of
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.runs import find_folder, run_at, run_folders, run_in, run_numbers
from graphft.runtime.coordination.status import JobStatus, list_jobs, read_status
from graphft.runtime.etcd import Etcd
from graphft.runtime.etcd.embedded import cache_dir, find_etcd, install_etcd, version_of
from graphft.runtime.launcher.display import render
from graphft.runtime.launcher.folder_status import FolderStatus, ListedRun, disk_bytes, list_folders, list_runs, look_at
from graphft.runtime.launcher.page_command import serve_page
from graphft.runtime.page.time_keeper import read_time
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK
from graphft.transpiler.record import RECORD, read_record

WATCH_SECONDS = 0.5
HEADER = ("folder", "state", "step", "loss", "best", "size", "launches", "preempted", "failed", "worked on last")
ETCD = "etcd"
AT_REST = ("complete", "stopped", "failed")


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

    etcd = commands.add_parser("etcd", help="which etcd is used where none is given; --install gets one")
    etcd.add_argument("--install", action="store_true", help="get one, if there is none that keeps what it is told")
    etcd.add_argument("--to", metavar="DIR", type=Path, help="where --install puts it (default: your cache)")
    etcd.set_defaults(command=_etcd)

    clean = commands.add_parser("clean", help="delete what complete jobs have no use for, and old runs")
    which = "a job's name, or a run's folder, as often as needed (default: all runs in ./jobs that are complete)"
    clean.add_argument("--job", action="append", default=[], help=which)
    what = "delete the checkpoints, too: the model stays, but the job cannot be gone on with, not with more epochs"
    clean.add_argument("--checkpoints", action="store_true", help=what)
    what = "delete runs wholly, also failed and abandoned ones: of each job all but the newest and the newest complete"
    clean.add_argument("--old-runs", action="store_true", help=what)
    clean.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    clean.set_defaults(command=_clean)

    page = commands.add_parser("page", help="serve a page that shows a job, whether it runs or not")
    page.add_argument("--job", default="", help="the job's name or folder, or its storage's URL (default: the last)")
    page.add_argument("--port", type=port, default=0, help="on 127.0.0.1 (default: a free one)")
    page.set_defaults(command=serve_page)


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise ValueError(text)
    return number


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
        kept = read_time(Path(str(status.spec.get("folder", ""))), str(status.spec.get("run", "")))
        return kept["left"] if kept is not None and status.state == "running" and not status.idle else None

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


# -- etcd -------------------------------------------------------------------------------------------------------------


def _etcd(options: argparse.Namespace) -> int:
    binary = install_etcd(options.to or cache_dir()) if options.install else find_etcd()
    print(f"etcd {version_of(binary)}: {binary}")
    return EXIT_OK


# -- clean ------------------------------------------------------------------------------------------------------------


def _clean(options: argparse.Namespace) -> int:
    named = [look_at(find_folder(name)) for name in options.job]
    for status in named:
        _check(status, options.checkpoints)
    found = named or [status for status in list_folders() if status.state == "complete"]
    paths = {path: status.folder for status in found for path in _needless(status.folder, options.checkpoints)}
    if options.old_runs:
        runs = named or list_folders()
        jobs = {status.folder.parent.parent for status in runs if status.folder.parent.name == RUNS}
        old = {path for job in jobs for path in _old_runs(job)}
        paths = {path: run for path, run in paths.items() if run not in old} | {path: path for path in sorted(old)}
    freed, failed = 0, False
    for path, run in paths.items():
        try:
            freed += _delete(path, run, options.dry_run)
        except (GraphftError, OSError) as error:
            print(f"{run}: {describe(error)}")
            failed = True
    print(f"{'would free' if options.dry_run else 'freed'} {size_in_words(freed)}")
    return EXIT_FAILED if failed else EXIT_OK


def _check(status: FolderStatus, checkpoints: bool) -> None:
    if status.state not in AT_REST or (checkpoints and status.state != "complete"):
        raise UsageError(
            f"the job in {status.folder} is {status.state}: "
            + ("it goes on from its checkpoints" if status.state in AT_REST else "nothing of it is deleted"),
            rule="not-complete",
            help="leave --checkpoints out" if status.state in AT_REST else "stop it first, or wait for its end",
        )


def _needless(run: Path, checkpoints: bool) -> Iterator[Path]:
    if checkpoints and (url := url_of(run)):
        print(f"{run}: what is in {url} stays")
    names = (ETCD, FOLDER) if checkpoints else (ETCD,)
    return (run / name for name in names if (run / name).is_dir())


def _old_runs(job: Path) -> list[Path]:
    kept = {run_in(str(job)), run_in(str(job), complete=True)}
    runs = [run_at(str(job), number) for number in run_numbers(job)]
    return [Path(run) for run in runs if run not in kept and Path(run, RECORD).exists()]


def _delete(path: Path, run: Path, dry_run: bool) -> int:
    """Returns the bytes. Raises GraphftError[job-running] if a process works in the run's folder, and OSError."""
    with locked(run):
        size = disk_bytes(path)
        if not dry_run:
            remove_folder(path)
        print(f"{'would delete' if dry_run else 'deleted'} {path}, {size_in_words(size)}")
    return size
