"""The commands `graphft etcd`, `graphft clean` and `graphft page`: their options, and the first two themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphft.disk.fileio import remove_folder, size_in_words
from graphft.errors import GraphftError, UsageError, describe
from graphft.runtime.checkpoint.store import FOLDER
from graphft.runtime.coordination.job_files import RUNS, url_of
from graphft.runtime.coordination.runs import find_folder, run_at, run_in, run_numbers
from graphft.runtime.etcd.embedded import cache_dir, find_etcd, install_etcd, version_of
from graphft.runtime.launcher.folder_status import FolderStatus, disk_bytes, list_folders, look_at
from graphft.runtime.launcher.page_command import serve_page
from graphft.runtime.process.folder_lock import locked
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK
from graphft.transpiler.record import RECORD

LOOK_SECONDS = 0.5
ETCD = "etcd"
AT_REST = ("complete", "stopped", "failed")


def add_parsers(commands: Any) -> None:
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
