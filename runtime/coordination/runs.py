"""The runs of a job: where they are, and which one a name means.

    jobs/NAME/runs/1/     a run: what `Job.save` wrote, its logs, metrics, checkpoints, model
              runs/2/
              latest      a link to the newest run
              model.safetensors, best.safetensors    links to those of the newest run that is complete

Below the URL of a storage, runs/1, runs/2, ... have the same numbers. A run may also have a folder, or a storage, of
its own (`job_dir=`, `Job.save`): then that path means this run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import posixpath
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.job_files import (
    JOBS,
    MODEL,
    RUNS,
    fetch,
    is_complete,
    is_complete_at,
    is_url,
    local_folder,
    local_place,
    reading,
    size_at,
    url_of,
)
from graphft.runtime.fs import file_system
from graphft.transpiler.record import RECORD, read_record

LATEST, BEST = "latest", "best.safetensors"


def run_numbers(place: str | os.PathLike[str]) -> list[int]:
    """Returns the numbers of the runs in a job's folder, or below its URL, ascending. Raises GraphftError[storage]."""
    place = os.fspath(place)
    names: list[str] = []
    if is_url(place):
        fs, root = file_system(place)
        with reading(place):
            names = fs.ls_dir(posixpath.join(root, RUNS))
    else:
        with contextlib.suppress(OSError):
            names = os.listdir(Path(place, RUNS))
    return sorted(int(name) for name in names if re.fullmatch(r"[1-9]\d*", name))


def run_at(place: str, number: int) -> str:
    return f"{place}/{RUNS}/{number}"


def run_in(place: str, *, complete: bool = False) -> str:
    """Returns the run that a folder or a URL means: itself, or the newest one in it (`complete`: that is, if there is
    one); "" if it holds none. Raises GraphftError[storage]."""
    if _has_record(place):
        return place
    runs = [run_at(place, number) for number in reversed(run_numbers(place))]
    done = filter(_is_done, runs if complete else ())
    return next(done, runs[0] if runs else "")


def find_run(job: str | os.PathLike[str], *, complete: bool = False) -> str:
    """Returns the folder, or the URL, of the run that a job's name, folder or URL means. Raises UsageError if there is
    none."""
    name = os.fspath(job)
    if is_url(name):
        return run_in(name.rstrip("/"), complete=complete) or name
    for place in (name, str(JOBS / name)):
        if found := run_in(place, complete=complete):
            return found
    if os.path.exists(name) or "/" in name:
        read_record(Path(name))  # says what is wrong with it
    help = f"jobs in {JOBS}: {', '.join(job_names()) or 'none'}; of an etcd: `graphft status --etcd HOST:PORT`"
    text = f"there is no job {name}: neither {name} nor {JOBS / name} holds one"
    raise UsageError(text, rule="unknown-job", help=help)


def find_folder(job: str | os.PathLike[str], *, complete: bool = False) -> Path:
    """Returns the folder of the run that `find_run` finds; for a URL, a copy of its record."""
    found = find_run(job, complete=complete)
    return copy_of(found) if is_url(found) else Path(found)


def weights_source(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Returns the newest complete run of a job that is named, or whose folder or URL is given; else the source."""
    name = os.fspath(source).rstrip("/")
    if os.path.isfile(name):
        return source
    with contextlib.suppress(GraphftError):  # its reader raises it, too
        places = (name, str(JOBS / name)) if "/" not in name and not os.path.exists(name) else (name,)
        return next(filter(None, (run_in(place, complete=True) for place in places)), source)
    return source


def job_names(root: Path = JOBS) -> list[str]:
    return sorted({path.relative_to(root).parts[0] for path in run_folders(root)})


def run_folders(root: Path = JOBS) -> Iterator[Path]:
    """Yields the folders of all runs of all jobs in a folder, and those of which that cannot be told."""
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.name.startswith("."):  # it is being deleted
            continue
        for path in (folder, *(Path(run_at(str(folder), number)) for number in run_numbers(folder))):
            try:
                (path / RECORD).stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                pass
            yield path


def copy_of(url: str) -> Path:
    """Returns the folder in ./jobs that has a copy of the run in this storage; else a copy of its record for this
    command, which no launch takes for a run."""
    here = local_place(url)
    if (here / RECORD).exists() and url_of(here) == url:
        return local_folder(url)
    scratch = tempfile.mkdtemp(prefix="graphft-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    fetch(url, Path(scratch, "job"), whole=False)
    return Path(scratch, "job")


def link_newest(run: Path, best: Path | None = None) -> None:
    """Links, in the job's folder, to a run, and to its model and `best` model once it is complete; not for a run in a
    folder of its own, nor on a file system without links."""
    if run.parent.name != RUNS:
        return
    top, links = run.parent.parent, {LATEST: run}
    if (run / MODEL).exists():
        links |= {MODEL: run / MODEL} | ({BEST: best} if best is not None else {})
        if best is None:
            (top / BEST).unlink(missing_ok=True)
    for name, target in links.items():
        scratch = top / f".{name}.{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            scratch.symlink_to(target.relative_to(top))
            os.replace(scratch, top / name)


def _has_record(place: str) -> bool:
    # False where one may not look
    return size_at(place, RECORD) is not None if is_url(place) else os.path.exists(Path(place, RECORD))


def _is_done(run: str) -> bool:
    try:
        return is_complete_at(run) if is_url(run) else is_complete(Path(run))
    except GraphftError:  # its record is damaged: it is not known to be complete
        return False
