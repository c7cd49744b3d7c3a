"""`graphft clean`: deletes what complete jobs have no use for, the data of their etcd above all, and old runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.disk.fileio import remove_folder, size_in_words
from graphft.errors import GraphftError, UsageError, describe
from graphft.runtime.checkpoint.store import FOLDER
from graphft.runtime.launcher.folder_sizes import disk_bytes
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK
from graphft.transpiler.record import RECORD

if TYPE_CHECKING:
    from graphft.runtime.launcher.folder_status import FolderStatus

ETCD = "etcd"
AT_REST = ("complete", "stopped", "failed")


def add_parser(commands: Any) -> None:
    clean = commands.add_parser("clean", help="delete what complete jobs have no use for, and old runs")
    which = "a job's name, or a run's folder, as often as needed (default: all runs in ./jobs that are complete)"
    clean.add_argument("--job", action="append", default=[], help=which)
    clean.add_argument(
        "--checkpoints",
        action="store_true",
        help="delete the checkpoints, too: the model stays, but the job cannot be gone on with, not with more passes",
    )
    clean.add_argument(
        "--old-runs",
        action="store_true",
        help="delete runs, also failed and abandoned ones, wholly: of each job all but the newest and the newest that "
        "is complete",
    )
    clean.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    clean.set_defaults(command=_clean)


def _clean(options: argparse.Namespace) -> int:
    """Tells of each folder that it deletes. Raises UsageError for a job that is named and is not to be cleaned."""
    from graphft.runtime.coordination.runs import RUNS, find_folder
    from graphft.runtime.launcher.folder_status import list_folders, look_at

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
    if status.state not in AT_REST:
        raise UsageError(
            f"the job in {status.folder} is {status.state}: nothing of it is deleted",
            rule="not-complete",
            help="stop it first, or wait for its end",
        )
    if checkpoints and status.state != "complete":
        raise UsageError(
            f"the job in {status.folder} is {status.state}: it goes on from its checkpoints",
            rule="not-complete",
            help="leave --checkpoints out; to be rid of the run, delete its folder",
        )


def _needless(run: Path, checkpoints: bool) -> Iterator[Path]:
    from graphft.runtime.coordination.job_storage import storage_of

    if checkpoints and (url := storage_of(run)):
        print(f"{run}: what is in {url} stays")
    names = (ETCD, FOLDER) if checkpoints else (ETCD,)
    return (run / name for name in names if (run / name).is_dir())


def _old_runs(job: Path) -> list[Path]:
    from graphft.runtime.coordination.runs import run_at, run_in, run_numbers

    kept = {run_in(str(job)), run_in(str(job), complete=True)}
    runs = [run_at(str(job), number) for number in run_numbers(job)]
    return [Path(run) for run in runs if run not in kept and Path(run, RECORD).exists()]


def _delete(path: Path, run: Path, dry_run: bool) -> int:
    """Returns the bytes. Raises GraphftError[job-running] if a process works in the run's folder, and OSError."""
    from graphft.runtime.process.folder_lock import locked

    with locked(run):
        size = disk_bytes(path)
        if not dry_run:
            remove_folder(path)
        print(f"{'would delete' if dry_run else 'deleted'} {path}, {size_in_words(size)}")
    return size
