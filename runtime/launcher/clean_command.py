"""`graphft clean`: deletes what complete jobs have no use for, the data of their etcd above all."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphft.errors import GraphftError, UsageError, describe
from graphft.fileio import remove_folder, size_in_words
from graphft.runtime.checkpoint.store import FOLDER
from graphft.runtime.launcher.folder_sizes import disk_bytes
from graphft.runtime.launcher.process_ends import lost_checkpoints
from graphft.runtime.process.role_process import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from graphft.runtime.launcher.folder_status import FolderStatus

ETCD = "etcd"
AT_REST = ("stopped", "failed")


def add_parser(commands: Any) -> None:
    clean = commands.add_parser("clean", help="delete what complete jobs have no use for")
    which = "a job's name or folder, as often as needed (default: all that are complete, in ./jobs)"
    clean.add_argument("--job", action="append", default=[], help=which)
    clean.add_argument(
        "--checkpoints",
        action="store_true",
        help="delete the checkpoints, too: the model stays, but the job cannot be gone on with, not with more passes",
    )
    clean.add_argument("--dry-run", action="store_true", help="only tell what would be deleted")
    clean.set_defaults(command=_clean)


def _clean(options: argparse.Namespace) -> int:
    """Tells of each folder that it deletes, and of jobs that it leaves alone. Raises UsageError for a job that is named
    and is not to be cleaned."""
    from graphft.runtime.coordination.runs import find_folder
    from graphft.runtime.launcher.folder_status import list_folders, look_at

    named = [look_at(find_folder(name)) for name in options.job]
    for status in named:
        _check(status, options.checkpoints)
    jobs = named or list_folders()
    found = [status for status in jobs if named or status.state == "complete"]
    freed, failed = 0, False
    for status in found:
        try:
            freed += _clean_job(status.folder, options.checkpoints, options.dry_run)
        except (GraphftError, OSError) as error:
            print(f"{status.folder}: {describe(error)}")
            failed = True
    if not named:
        _tell_others(jobs)
    print(f"{'would free' if options.dry_run else 'freed'} {size_in_words(freed)}")
    return EXIT_FAILED if failed else EXIT_OK


def _check(status: FolderStatus, checkpoints: bool) -> None:
    """Raises UsageError. A Trainer's run is never complete: what its etcd knows may go, for it goes on from its newest
    checkpoint."""
    if status.state == "complete":
        return
    if not status.on_demand or status.state not in AT_REST:
        raise UsageError(
            f"the job in {status.folder} is {status.state}: nothing of it is deleted",
            rule="not-complete",
            help="end its script" if status.on_demand else "run it to its end; to be rid of it, delete its folder",
        )
    if lost := lost_checkpoints(status.folder, status.step):
        raise UsageError(
            f"the checkpoints of {status.folder} {lost}: what its etcd knows stays",
            rule="not-complete",
            help="bring them back; to be rid of the run, delete its folder",
        )
    if checkpoints:
        raise UsageError(
            f"the run in {status.folder} is a Trainer's, which is never complete: it goes on from its checkpoints",
            rule="not-complete",
            help="leave --checkpoints out; to be rid of the run, delete its folder",
        )


def _tell_others(jobs: Sequence[FolderStatus]) -> None:
    others = [status for status in jobs if status.state != "complete" and (status.folder / ETCD).is_dir()]
    for status in others:
        rests = status.on_demand and status.state in AT_REST
        how = f": graphft clean --job {status.folder} deletes what its etcd knows" * rests
        print(f"{status.folder} is {status.state}, and left alone{how}")


def _clean_job(folder: Path, checkpoints: bool, dry_run: bool) -> int:
    """Returns the bytes. Raises GraphftError[job-running] if a process works in the folder, and OSError."""
    from graphft.runtime.coordination.job_storage import storage_of
    from graphft.runtime.process.folder_lock import locked

    freed = 0
    if checkpoints and (url := storage_of(folder)):
        print(f"{folder}: what is in {url} stays")
    with locked(folder):
        for path in _needless(folder, checkpoints):
            size = disk_bytes(path)
            if not dry_run:
                remove_folder(path)
            print(f"{'would delete' if dry_run else 'deleted'} {path}, {size_in_words(size)}")
            freed += size
    return freed


def _needless(folder: Path, checkpoints: bool) -> Iterator[Path]:
    names = (ETCD, FOLDER) if checkpoints else (ETCD,)
    return (folder / name for name in names if (folder / name).is_dir())
