"""The storage of a job, `transpile(storage=URL)`: the files of a run that last lie there, and its folder is a copy.

    <url>/job.json                 made only if there is none: from then on the storage is this run's
          job-<run>/...            the other files of `Job.save`, and files.json: sha256 of each
          checkpoints/...          parts and manifests (see `checkpoint.versioned_store`)
          launcher.txt             of launchers that each bring an etcd of their own, the one that may write: the newest
          metrics.rows             the job's table of metrics, as of a checkpoint of late
          discarded.jsonl, result.json, model.safetensors
                               result.json: sha256 of the others; the model last: the run is complete

A process on any machine needs the URL and etcd; logs and an own etcd's data stay where they are written. Pservers of a
launcher that was cut off, or forgotten on another machine, find another one in launcher.txt, and end at their next
checkpoint. Where all machines share an etcd, that decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from graphft.disk.fileio import scratch_folder, write_atomically
from graphft.disk.sealed_json import parse_json
from graphft.errors import GraphftError, UsageError, plain_text
from graphft.runtime.coordination.result_files import DISCARDED
from graphft.runtime.fs import FS, file_system
from graphft.runtime.process.metric_table import FILE as METRICS
from graphft.transpiler.record import MARKER, RECORD, SAVED, read_record

JOBS, RUNS = Path("jobs"), "runs"
"""Folders of the jobs, in the working directory, and of a job's runs, by their numbers (see `runs`)."""
MODEL = "model.safetensors"
"""The trained model, in the folder (and the storage) of a job that is complete."""
ENTRIES = "entries"
"""Folder of the entries that validations keep for each record (see `validation.results`)."""
_PUBLISHED = "published"
"""In the folder: the id of the run, once its storage has held it. If that holds nothing later, it is away."""
_LISTING, _RESULT, _LAUNCHER = "files.json", "result.json", "launcher.txt"


def url_of(job_dir: Path) -> str:
    """Returns the URL of the storage of the job in this folder; "" if it has none. Raises GraphftError[load] if that is
    not to be read."""
    path = job_dir / MARKER
    try:
        return str(parse_json(path.read_bytes())["url"]) if path.exists() else ""
    except (ValueError, KeyError, TypeError, IsADirectoryError) as error:
        raise GraphftError(
            f"{path} is damaged: {error}",
            rule="load",
            help="delete this folder: it is a copy, the job is in its storage",
        ) from error


def is_url(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Raises GraphftError[storage] for an OSError."""
    try:
        yield
    except OSError as error:
        raise GraphftError(
            f"the storage {url} cannot be used: {error}",
            rule="storage",
            help="see whether it can be reached from here, and what FSSPEC_* or the store's own variables say",
        ) from error


# -- the job ----------------------------------------------------------------------------------------------------------


def stored_run(url: str) -> str:
    """Returns the id of the run that this storage is of; "" if it is free. Raises GraphftError[storage]."""
    data = _read(url, RECORD)
    try:
        return str(parse_json(data)["run"]) if data is not None else ""
    except (ValueError, KeyError, TypeError) as error:
        raise GraphftError(
            f"{url}/{RECORD} is damaged: {error}", rule="load", help="give the job a new storage; this one stays"
        ) from error


def is_published(job_dir: Path) -> bool:
    """True if the storage of the job in this folder has held it, as far as the folder tells."""
    try:
        return (job_dir / _PUBLISHED).read_bytes().decode() == read_record(job_dir).run_id
    except FileNotFoundError:
        return False


def publish(job_dir: Path) -> None:
    """Puts the job in this folder into its storage, if it is not there. Raises UsageError[job-directory] if the storage
    is another run's, GraphftError[storage]: also if it has held this run, and holds nothing now."""
    url, run = url_of(job_dir), read_record(job_dir).run_id
    if not url:
        return
    found, published = stored_run(url), is_published(job_dir)
    if not found and published:
        raise GraphftError(
            f"{url} has held run {run}, and holds nothing now",
            rule="storage",
            help="is its file system mounted? If all is gone for good, begin a new run: --fresh, or another storage",
        )
    if not found:
        fs, root = file_system(url)
        with reading(url):
            _upload(fs, posixpath.join(root, f"job-{run}"), job_dir, _saved_files(job_dir))
            fs.create(posixpath.join(root, RECORD), (job_dir / RECORD).read_bytes())
        found = stored_run(url)  # another process may have made it
    if found != run:
        raise UsageError(
            f"{url} holds run {found}, and that in {job_dir} is {run}",
            rule="job-directory",
            help="give this run another storage, or go on with that one: graphft launch --job " + url,
        )
    if not published:
        with contextlib.suppress(OSError):  # a disk that is full: it only cannot be known later
            write_atomically(job_dir / _PUBLISHED, run.encode())


def fetch(url: str, target: Path, *, whole: bool = True) -> bool:
    """Makes `target` a copy of the job in this storage, or of its record (not `whole`): wholly, or not at all. Returns
    True if this call made it. Raises UsageError[job-directory] if the storage holds no job, or the folder something
    else; GraphftError[storage]; GraphftError[load] for a file that is not the one that was uploaded."""
    run, target = stored_run(url), target.resolve() if target.is_symlink() else target  # no folder replaces a link
    if not run:
        remedy = "give the URL of transpile(storage=); if it is that, see whether its file system is mounted"
        raise UsageError(f"{url} holds no job", rule="job-directory", help=remedy)
    if (target / RECORD).exists() and read_record(target).run_id == run:
        return False
    if target.exists() and any(target.iterdir()):
        raise UsageError(
            f"{target} is to be a copy of the job in {url}, run {run}, and holds something else",
            rule="job-directory",
            help="start from another folder, or delete this one",
        )
    fs, root = file_system(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target) as scratch:
        new = scratch / "job"
        with reading(url):
            _download(fs, posixpath.join(root, f"job-{run}"), _LISTING, new, None if whole else {MARKER})
            fs.download(posixpath.join(root, RECORD), new / RECORD)
            write_atomically(new / _PUBLISHED, run.encode())
        try:
            new.rename(target)
        except OSError:  # another process has just made it
            if not (target / RECORD).exists() or read_record(target).run_id != run:
                raise
            return False
    return True


def local_place(url: str) -> Path:
    """Returns the folder in ./jobs for a copy of the run in this storage."""
    run = re.fullmatch(rf"(.*)/({RUNS}/[1-9]\d*)", url)
    return JOBS / posixpath.basename(run[1]) / run[2] if run else JOBS / posixpath.basename(url)


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the folder of a job that is given by its folder, or by the URL of its storage: then a copy in ./jobs."""
    if not is_url(path):
        return Path(path)
    url = os.fspath(path).rstrip("/")
    target = local_place(url)
    fetch(url, target)
    return target


# -- files with their digests -----------------------------------------------------------------------------------------


def _saved_files(job_dir: Path) -> Iterator[str]:
    for top in SAVED:
        path = job_dir / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield file.relative_to(job_dir).as_posix()


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", 0) as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _upload(fs: FS, root: str, folder: Path, names: Iterable[str]) -> None:
    listing = {}
    for name in names:
        listing[name] = _digest(folder / name)
        fs.upload(folder / name, posixpath.join(root, name))
    _write_listing(fs, posixpath.join(root, _LISTING), listing)


def _write_listing(fs: FS, path: str, listing: Mapping[str, str]) -> None:
    with fs.writing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(listing)))


def _download(fs: FS, root: str, listing: str, target: Path, only: set[str] | None = None) -> list[str]:
    """Downloads the files that are listed there, or `only` these of them. Returns their names. Raises
    GraphftError[load] for one that is not the one that was uploaded."""
    remedy = "give the job another storage; `graphft checkpoint export URL FILE --version STEP` writes a step's weights"
    with fs.open(posixpath.join(root, listing)) as file:
        data = file.read()
    try:
        files = msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GraphftError(f"{root}/{listing} is damaged: {error}", rule="load", help=remedy) from error
    names = [name for name in files if only is None or name in only]
    for name in names:
        place = Path(os.path.normpath(target / name))
        if not place.is_relative_to(target):
            raise GraphftError(f"{root}/{listing} names {name}", rule="load", help="it is no job of graphft's")
        fs.download(posixpath.join(root, name), place)
        if _digest(place) != files[name]:
            raise GraphftError(f"{root}/{name} is not what was uploaded", rule="load", help=remedy)
    return names


# -- its end ----------------------------------------------------------------------------------------------------------


def has_model(job_dir: Path) -> bool:
    """True if the job in this folder is complete, as far as the folder tells: it leaves its model there."""
    return (job_dir / MODEL).exists()


def is_complete(job_dir: Path) -> bool:
    """True if the job in this folder is complete, by the folder or by its storage, if it can be reached."""
    return has_model(job_dir) or (bool(url := url_of(job_dir)) and is_complete_at(url))


def is_complete_at(url: str) -> bool:
    """True if this storage has a model. False if it cannot be reached."""
    fs, root = file_system(url)
    try:
        return fs.size(posixpath.join(root, MODEL)) is not None
    except OSError:
        return False


def publish_result(job_dir: Path, model: Path) -> None:
    """Uploads the results of a complete job, the model last; then that gets its name here, too. Raises OSError."""
    fs, root = file_system(url_of(job_dir))
    result = {}
    for name in (DISCARDED, METRICS):
        if (job_dir / name).exists():
            result[name] = _digest(job_dir / name)
            fs.upload(job_dir / name, posixpath.join(root, name))
        else:
            fs.delete(posixpath.join(root, name))
    _write_listing(fs, posixpath.join(root, _RESULT), {**result, MODEL: _digest(model)})
    fs.upload(model, posixpath.join(root, MODEL))
    os.replace(model, job_dir / MODEL)


def fetch_result(job_dir: Path) -> None:
    """Downloads the results of a complete job, unless they are here. Raises as `download_result`."""
    url = url_of(job_dir)
    if url and not has_model(job_dir) and size_at(url, MODEL) is not None:
        download_result(url, job_dir)


def download_result(url: str, target: Path) -> None:
    """Downloads the results of the complete job in this storage into a folder: the model last, and nothing damaged.
    Raises GraphftError[storage], GraphftError[load]."""
    fs, root = file_system(url)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".result.", dir=target) as scratch:
        with reading(url):
            names = _download(fs, root, _RESULT, Path(scratch))
        for name in names:
            os.replace(Path(scratch, name), target / name)


def has_remote_checkpoints(job_dir: Path) -> bool:
    """True if a checkpoint of the job lies in its storage, which another machine may have written."""
    if not (url := url_of(job_dir)):
        return False
    fs, root = file_system(url)
    with reading(url):
        return bool(fs.ls_dir(posixpath.join(root, "checkpoints")))


def put_metrics(job_dir: Path) -> None:
    """Uploads the job's table of metrics, if it has a storage. Raises OSError."""
    if url := url_of(job_dir):
        fs, root = file_system(url)
        fs.upload(job_dir / METRICS, posixpath.join(root, METRICS))


def fetch_metrics(job_dir: Path) -> None:
    """Downloads the job's table of metrics, if the storage has a longer one than this folder. Raises OSError."""
    path, url = job_dir / METRICS, url_of(job_dir)
    if not url:
        return
    fs, root = file_system(url)
    if (fs.size(posixpath.join(root, METRICS)) or 0) > (path.stat().st_size if path.exists() else 0):
        with scratch_folder(path) as scratch:
            fs.download(posixpath.join(root, METRICS), scratch / METRICS)
            os.replace(scratch / METRICS, path)


# -- small files beside its record ------------------------------------------------------------------------------------


def _read(url: str, name: str) -> bytes | None:
    """Returns a small file; None if there is none. Raises GraphftError[storage]."""
    fs, root = file_system(url)
    with reading(url):
        try:
            with fs.open(posixpath.join(root, name)) as file:
                return file.read()
        except FileNotFoundError:
            return None


def size_at(url: str, name: str) -> int | None:
    """Returns the bytes of this file there; None if there is none. Raises GraphftError[storage]."""
    fs, root = file_system(url)
    with reading(url):
        return fs.size(posixpath.join(root, name))


def delete_entries(job_dir: Path, folder: str = ENTRIES) -> None:
    """Deletes the entries of one validation, or of all, as far as they can be deleted: a process that is killed when it
    has concluded one leaves them."""
    shutil.rmtree(job_dir / folder, ignore_errors=True)
    if url := url_of(job_dir):
        fs, path = file_system(url)
        with contextlib.suppress(OSError):
            fs.delete(posixpath.join(path, folder))


# -- which launcher may write -----------------------------------------------------------------------------------------


def take_storage(job_dir: Path, shared: bool = False) -> None:
    """Makes this process the launcher that may write to the storage of the run in this folder, if it has one; where
    all machines share an etcd, that decides. Raises GraphftError[storage]."""
    url = url_of(job_dir)
    if shared or not url:
        (job_dir / _LAUNCHER).unlink(missing_ok=True)
        return
    data = f"pid {os.getpid()} on host {socket.gethostname()} ({uuid.uuid4().hex[:8]})".encode()
    write_atomically(job_dir / _LAUNCHER, data)
    fs, root = file_system(url)
    with reading(url), fs.writing(posixpath.join(root, _LAUNCHER)) as file:
        file.write(data)


def check_launcher(job_dir: Path) -> None:
    """Raises UsageError[storage] if another launcher has taken the storage after that of this job's processes; OSError
    if the storage is away (a file system that is not mounted is an empty folder), GraphftError[storage]."""
    url = url_of(job_dir)
    if not url or not (job_dir / _LAUNCHER).exists():
        return
    found = _read(url, _LAUNCHER)
    if found == (job_dir / _LAUNCHER).read_bytes():
        return
    if found is None and size_at(url, RECORD) is None:
        raise OSError(f"nothing of the job is in {url}: is its file system mounted?")
    raise UsageError(
        f"{plain_text((found or b'another launcher').decode(errors='replace'))} runs the job in {url} now",
        rule="storage",
        help="of two launchers the newer one has the storage: leave the job to it, or launch it here again",
    )
