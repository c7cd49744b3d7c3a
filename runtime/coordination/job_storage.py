"""The storage of a job, `transpile(storage=URL)`: what lasts of a run lies there, and its folder is a copy.

    <url>/job.json                 made only if there is none: from then on the storage is this run's
          job-<run>/...            what `Job.save` wrote besides, and files.json: size and sha256 of each file
          checkpoints/...          parts and manifests (see `checkpoint.versioned_store`)
          continued.json           which run went on from here with other pservers
          metrics.rows         the job's table of metrics, as of a checkpoint of late
          discarded.jsonl, result.json, model.safetensors
                               result.json: size and sha256 of the others; the model last: the run is complete

A process on any machine needs the URL and etcd. Logs and the data of an etcd that was started with the job
stay in the folder of the machine that writes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from graphft.disk.fileio import PIECE, NotRegular, open_regular, read_regular, scratch_folder, write_atomically
from graphft.disk.sealed_json import parse_json
from graphft.errors import GraphftError, UsageError
from graphft.runtime.coordination.discarded import FILE as DISCARDED
from graphft.runtime.fs import FS, file_system
from graphft.runtime.process.metric_table import FILE as METRICS
from graphft.transpiler.record import MARKER, RECORD, SAVED, JobRecord, read_record

log = logging.getLogger("graphft")

JOBS = Path("jobs")
"""Where the folders of jobs are, in the working directory."""
RUNS = "runs"
"""Folder of a job's runs, by their numbers (see `runs`)."""
MODEL = "model.safetensors"
"""The trained model, in the folder (and the storage) of a job that is complete."""
ENTRIES = "entries"
"""Folder of what validations keep for each record."""
_PUBLISHED = "published"
"""In the folder: the id of the run, once its storage has held it. If that holds nothing later, it is away."""
_LISTING, _RESULT = "files.json", "result.json"
_HEALTH = "see whether it can be reached from here, and what FSSPEC_* or the store's own variables say"


class _Uploaded(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


def storage_of(job_dir: Path) -> str:
    """The URL of the storage of the job in this folder; "" if it has none. Raises GraphftError[load] if that is not
    to be read."""
    path = job_dir / MARKER
    try:
        return str(parse_json(read_regular(path))["url"]) if path.exists() else ""
    except (ValueError, KeyError, TypeError, IsADirectoryError, NotRegular) as error:
        raise GraphftError(
            f"{path} is damaged: {error}",
            rule="load",
            help="delete this folder: it is a copy, the job is in its storage",
        ) from error


def is_url(path: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(path)


# -- the job ----------------------------------------------------------------------------------------------------------


def stored_run(url: str) -> str:
    """The id of the run that this storage is of; "" if it is free. Raises GraphftError[storage]."""
    fs, root = file_system(url)
    data = _read(fs, posixpath.join(root, RECORD), url)
    try:
        return str(parse_json(data)["run"]) if data is not None else ""
    except (ValueError, KeyError, TypeError) as error:
        raise GraphftError(
            f"{url}/{RECORD} is damaged: {error}", rule="load", help="give the job a new storage; this one stays"
        ) from error


def is_published(job_dir: Path) -> bool:
    """Whether the storage of the job in this folder has held it, as far as the folder tells."""
    try:
        return read_regular(job_dir / _PUBLISHED).decode() == read_record(job_dir).run_id
    except FileNotFoundError:
        return False


def publish(job_dir: Path) -> None:
    """Puts the job in this folder into its storage, where others find it. Nothing happens if it is there.

    Raises UsageError[job-directory] if the storage is another run's, GraphftError[storage]: also if it has held this
    run, and holds nothing now.
    """
    url, run = storage_of(job_dir), read_record(job_dir).run_id
    if not url:
        return
    found, published = stored_run(url), is_published(job_dir)
    if not found and published:
        raise _gone(url, run)
    if found != run:
        _put(job_dir, url, run)
    if not published:
        with contextlib.suppress(OSError):  # a disk that is full: it only cannot be told later
            write_atomically(job_dir / _PUBLISHED, run.encode())


def _put(job_dir: Path, url: str, run: str) -> None:
    fs, root = file_system(url)
    try:
        _upload(fs, posixpath.join(root, f"job-{run}"), job_dir)
        made = fs.create(posixpath.join(root, RECORD), (job_dir / RECORD).read_bytes())
    except OSError as error:
        raise _unavailable(url, error) from error
    if not made and (found := stored_run(url)) != run:
        fs.delete(posixpath.join(root, f"job-{run}"))
        raise UsageError(
            f"{url} holds run {found}, and that in {job_dir} is {run}",
            rule="job-directory",
            help="give this run another storage, or go on with that one: graphft launch --job " + url,
        )


def fetch(url: str, target: Path, *, whole: bool = True) -> JobRecord:
    """Makes `target` a copy of the job in this storage, wholly or not at all; nothing happens if it is one already.

    `whole`: False for its record alone. Raises UsageError[job-directory] if the storage holds no job, or the folder
    something else; GraphftError[storage]; GraphftError[load] for a file that is not what was uploaded.
    """
    make_copy(url, target, whole=whole)
    return read_record(target)


def make_copy(url: str, target: Path, *, whole: bool = True) -> bool:
    """As `fetch`. Whether it was this call that made it."""
    run, target = stored_run(url), target.resolve() if target.is_symlink() else target  # no folder replaces a link
    if not run and storage_of(target) == url and is_published(target):
        raise _gone(url, read_record(target).run_id)
    if not run:
        remedy = "give what was given to transpile(storage=); if it is that, see whether its file system is mounted"
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
        try:
            _download(fs, posixpath.join(root, f"job-{run}"), new, None if whole else {MARKER})
            fs.download(posixpath.join(root, RECORD), new / RECORD)
            write_atomically(new / _PUBLISHED, run.encode())
        except OSError as error:
            raise _unavailable(url, error) from error
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
    """The folder of a job that is given by its folder, or by the URL of its storage: then a copy in ./jobs. While the
    storage cannot be asked, that copy is taken as it is."""
    if not is_url(path):
        return Path(path)
    url = os.fspath(path).rstrip("/")
    target = local_place(url)
    try:
        fetch(url, target)
    except GraphftError as error:
        if error.rule != "storage" or storage_of(target) != url or not is_published(target):
            raise
        log.warning("%s: going by the copy in %s", error.message, target)
    return target


def _upload(fs: FS, root: str, job_dir: Path) -> None:
    listing = {}
    for name in _saved_files(job_dir):
        fs.upload(job_dir / name, posixpath.join(root, name))
        listing[name] = _uploaded(job_dir / name)
    _write_listing(fs, posixpath.join(root, _LISTING), listing)


def _uploaded(file: Path) -> _Uploaded:
    return _Uploaded(file.stat().st_size, _sha256(file))


def _write_listing(fs: FS, path: str, listing: Mapping[str, _Uploaded]) -> None:
    with fs.writing(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(listing)))


def _saved_files(job_dir: Path) -> Iterator[str]:
    for top in SAVED:
        path = job_dir / top
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                yield file.relative_to(job_dir).as_posix()


def _listing(fs: FS, path: str) -> dict[str, _Uploaded]:
    with fs.open(path) as file:
        data = file.read()
    try:
        return msgspec.json.decode(data, type=dict[str, _Uploaded])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GraphftError(
            f"{path} is damaged: {error}", rule="load", help="transpile the job again, with another storage"
        ) from error


def _download(fs: FS, root: str, target: Path, only: set[str] | None) -> None:
    for name, expected in _listing(fs, posixpath.join(root, _LISTING)).items():
        place = Path(os.path.normpath(target / name))
        if not place.is_relative_to(target):
            raise GraphftError(f"{root}/{_LISTING} names {name}", rule="load", help="it is no job of graphft's")
        if only is None or name in only:
            fs.download(posixpath.join(root, name), place)
            _check(place, expected, f"{root}/{name}", "transpile the job again, with another storage")


def _check(file: Path, expected: _Uploaded, source: str, remedy: str) -> None:
    """Raises GraphftError[load] for a file that was downloaded, and is not what was uploaded."""
    found = _uploaded(file)
    if found != expected:
        raise GraphftError(
            f"{source} is not what was uploaded: {found.bytes} bytes with sha256 {found.sha256[:12]}..., expected "
            f"{expected.bytes} with {expected.sha256[:12]}...",
            rule="load",
            help=remedy,
        )


# -- its end ----------------------------------------------------------------------------------------------------------


def has_model(job_dir: Path) -> bool:
    """Whether the job in this folder has come to its end, as far as the folder tells: it leaves its model there."""
    return (job_dir / MODEL).exists()


def is_complete(job_dir: Path) -> bool:
    """Whether the job in this folder has come to its end; its storage is asked, too, if it has one."""
    return has_model(job_dir) or is_stored_complete(job_dir)


def is_stored_complete(job_dir: Path) -> bool:
    """Whether the storage of the job in this folder has its model. False if it cannot be reached, or there is none."""
    url = storage_of(job_dir)
    return bool(url) and is_complete_at(url)


def is_complete_at(url: str) -> bool:
    """Whether this storage has a model. False if it cannot be reached."""
    fs, root = file_system(url)
    try:
        return fs.size(posixpath.join(root, MODEL)) is not None
    except OSError:
        return False


def put_mark(url: str, name: str, data: bytes) -> None:
    """Writes a small file beside the job's record. Raises GraphftError[storage]."""
    fs, root = file_system(url)
    try:
        with fs.writing(posixpath.join(root, name)) as file:
            file.write(data)
    except OSError as error:
        raise _unavailable(url, error) from error


def read_mark(url: str, name: str) -> bytes | None:
    """What `put_mark` wrote; None if there is none. Raises GraphftError[storage]."""
    fs, root = file_system(url)
    return _read(fs, posixpath.join(root, name), url)


def begun_in_storage(job_dir: Path) -> bool:
    """Whether a checkpoint of the job lies in its storage, which another machine may have written."""
    url = storage_of(job_dir)
    if not url:
        return False
    fs, root = file_system(url)
    try:
        return bool(fs.ls_dir(posixpath.join(root, "checkpoints")))
    except OSError as error:
        raise _unavailable(url, error) from error


def publish_result(job_dir: Path, model: Path) -> None:
    """Uploads what a complete job leaves, the model last; then that gets its name here, too. Raises OSError."""
    fs, root = file_system(storage_of(job_dir))
    result = {MODEL: _uploaded(model)}
    for name in (DISCARDED, METRICS):
        if (job_dir / name).exists():
            result[name] = _uploaded(job_dir / name)
            fs.upload(job_dir / name, posixpath.join(root, name))
        else:
            fs.delete(posixpath.join(root, name))
    _write_listing(fs, posixpath.join(root, _RESULT), result)
    fs.upload(model, posixpath.join(root, MODEL))
    os.replace(model, job_dir / MODEL)


def fetch_result(job_dir: Path) -> None:
    """Downloads what a complete job has left, unless it is here. Raises as `download_result`."""
    url = storage_of(job_dir)
    if not url or (job_dir / MODEL).exists():
        return
    fs, root = file_system(url)
    try:
        there = fs.size(posixpath.join(root, MODEL)) is not None
    except OSError as error:
        raise _unavailable(url, error) from error
    if there:
        download_result(url, job_dir)


def download_result(url: str, target: Path) -> None:
    """What the complete job in this storage has left, into a folder: the model last, and nothing that is damaged.

    Raises GraphftError[storage]; GraphftError[load] for a file that is not what was uploaded.
    """
    fs, root = file_system(url)
    remedy = f"graphft checkpoint export {url} model.safetensors --version STEP has it from the last checkpoint"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".result.", dir=target) as scratch:
        try:
            result = _listing(fs, posixpath.join(root, _RESULT))
            names = [name for name in (DISCARDED, METRICS, MODEL) if name in result]
            for name in names:
                fs.download(posixpath.join(root, name), Path(scratch, name))
        except OSError as error:
            raise _unavailable(url, error) from error
        for name in names:
            _check(Path(scratch, name), result[name], f"{url}/{name}", remedy)
        for name in names:
            os.replace(Path(scratch, name), target / name)


def put_metrics(job_dir: Path) -> None:
    """Uploads the job's table of metrics, if it has a storage. Raises OSError."""
    if url := storage_of(job_dir):
        fs, root = file_system(url)
        fs.upload(job_dir / METRICS, posixpath.join(root, METRICS))


def fetch_metrics(job_dir: Path) -> None:
    """Downloads the job's table of metrics, if the storage has a longer one than this folder. Raises OSError."""
    path, url = job_dir / METRICS, storage_of(job_dir)
    if not url:
        return
    fs, root = file_system(url)
    if (fs.size(posixpath.join(root, METRICS)) or 0) > (path.stat().st_size if path.exists() else 0):
        with scratch_folder(path) as scratch:
            fs.download(posixpath.join(root, METRICS), scratch / METRICS)
            os.replace(scratch / METRICS, path)


def _read(fs: FS, path: str, url: str) -> bytes | None:
    with reading(url):
        try:
            with fs.open(path) as file:
                return file.read()
        except FileNotFoundError:
            return None


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Raises GraphftError[storage] for an OSError."""
    try:
        yield
    except OSError as error:
        raise _unavailable(url, error) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path, 0) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _gone(url: str, run: str) -> GraphftError:
    return GraphftError(
        f"{url} has held run {run}, and holds nothing now",
        rule="storage",
        help="is its file system mounted? If all is gone for good, begin a new run: --fresh, or another storage",
    )


def _unavailable(url: str, error: OSError) -> GraphftError:
    return GraphftError(f"the storage {url} cannot be used: {error}", rule="storage", help=_HEALTH)


def delete_entries(job_dir: Path, folder: str = ENTRIES) -> None:
    """Deletes the entries of one validation, or of all (see `validation.results`), as far as they can be deleted: a
    process that is killed when it has concluded one leaves them."""
    shutil.rmtree(job_dir / folder, ignore_errors=True)
    if url := storage_of(job_dir):
        fs, path = file_system(url)
        with contextlib.suppress(OSError):
            fs.delete(posixpath.join(path, folder))
