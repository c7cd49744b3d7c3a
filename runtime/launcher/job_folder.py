"""The folder that a run is in: an unfinished run of the same job is resumed, anything else gets a new folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from graphft.data_fingerprint import is_record, same_entries
from graphft.errors import GraphftError, UsageError
from graphft.fileio import read_regular
from graphft.runtime.checkpoint.saved_step import saved_step
from graphft.runtime.coordination.connect import is_complete
from graphft.runtime.coordination.job_storage import (
    JOBS,
    begun_in_storage,
    is_complete_at,
    make_copy,
    publish,
    put_mark,
    read_mark,
    storage_of,
    stored_run,
    withdraw,
)
from graphft.runtime.coordination.storage_claim import claimed
from graphft.runtime.launcher.process_ends import lost_checkpoints
from graphft.runtime.process.folder_lock import locked
from graphft.sealed_json import parse_json

if TYPE_CHECKING:
    from graphft.data import DataSpec
    from graphft.transpiler import Job, JobConfig

CONTINUED = "continued.json"
"""In a run's folder, and in its storage: which other one went on from its checkpoint, with other pservers or more
passes."""
_TRACES = ("etcd.json", "etcd", "checkpoints")
"""What a run that was begun has in its folder, beside its logs and what `Job.save` writes."""
_NOTES = {"launcher.lock", "callbacks.lock", "csv-logger.json"}
"""What a script leaves there before any process is started."""
_NO_CHECKPOINT = "no checkpoint to go on from (its model.safetensors can be the start: init_from=)"
_BATCH_LOGS = "slurm-"
"""Logs of Slurm's, which begin before a run does: `graphft slurm` makes their folder."""


@dataclass(frozen=True)
class Obstacle:
    """What a folder is or holds that keeps a job from being run in it. `distance`: in how many things the run there
    differs from the job."""

    what: str
    distance: int = 1 << 30
    layout: bool = False
    """Whether it is an unfinished run of the very job, but on other pservers, or a run of fewer passes of it."""


@dataclass(frozen=True)
class Passed:
    """A folder that was looked at, and holds something else."""

    path: Path
    held: Obstacle
    url: str = ""
    """The storage that the run was to have, which holds that one."""
    job: str = ""
    """Its name."""

    @property
    def text(self) -> str:
        if not self.url:
            return f"{self.path} {self.held.what}"
        return f"{self.url} holds job {self.job}, which {self.held.what}"


@dataclass(frozen=True)
class JobFolder:
    """A run's folder. `made`: for this launch. `passed`: folders that hold other runs, the nearest one first, each with
    what it holds.

    `job`: that of the script, which was compared with the folder's, and is the same.
    """

    path: Path
    made: bool = False
    passed: tuple[str, ...] = ()
    job: JobConfig | None = None
    carried: str = ""
    """What it goes on with: of the nearest folder's run, which has other pservers, or fewer passes."""
    entries: frozenset[str] = frozenset()
    """Of one that was made: what it held then."""

    def forget(self) -> bool:
        """Deletes what was made for a run that no process has begun: no later script is to find one here. Not where
        somebody has put anything else into the folder. Whether it did. Raises GraphftError[storage]."""
        if not self.made or not self.path.is_dir():
            return False
        with contextlib.suppress(UsageError), locked(self.path):  # another script may begin it at this moment
            if begun(self.path) or not {path.name for path in self.path.iterdir()} <= self.entries | _NOTES:
                return False
            withdraw(self.path)
            shutil.rmtree(self.path, ignore_errors=True)
            return True
        return False

    def describe(self, config: JobConfig) -> str:
        """What is run here, on one line: the first one that a launcher prints."""
        others = len(self.passed) - 1
        more = [f"{others} other folder{'s hold other runs' * (others > 1) or ' holds another run'}"] * (others > 0)
        return "; ".join([*self.passed[:1], *more, self._here(config)])

    def _here(self, config: JobConfig) -> str:
        if self.carried:
            return f"going on {self.carried} in {self.path}"
        if not begun(self.path):
            return f"new run in {self.path}" + (f", storage {url}" if (url := storage_of(self.path)) else "")
        same = f" (job unchanged{self._as_far(self.job)})" if self.job is not None else ""
        if not config.ft:
            return f"beginning {self.path} anew{same}: without fault tolerance (ft=False) no run can be resumed"
        return f"resuming {self.path} {where(self.path, config)}{same}"

    def _as_far(self, config: JobConfig) -> str:
        """How far it is known that the data is the same: of a dataset, some records were compared."""
        from graphft.transpiler import read_record

        old, new = (_described(of) for of in (read_record(self.path).config, config))
        both = [(one, other) for one, other in zip(old, new, strict=False) if other.kind == "dataset"]
        compared = sum(sum(map(is_record, same_entries(*(s.fingerprint() for s in pair))[0])) for pair in both)
        if compared == sum(other.records for _, other in both):
            return ""
        if not compared:
            return ", as far as is known: no records of its Dataset were compared"
        return f", as far as {compared} of its Dataset's records tell"


def _described(config: JobConfig) -> list[DataSpec]:
    """What is trained on, and what is validated with."""
    return [config.data, *([config.validate.data] if config.validate is not None else [])]


def begun(path: Path) -> bool:
    """Whether a process of the run in this folder was ever started: the folder may only have been saved, or copied from
    the job's storage. Raises GraphftError[storage]."""
    logs = any(not log.name.startswith(_BATCH_LOGS) for log in (path / "logs").glob("*.log"))
    return logs or any((path / name).exists() for name in _TRACES) or begun_in_storage(path)


def where(path: Path, config: JobConfig) -> str:
    """ "at step 100 of 2048": where the run in this folder goes on."""
    step = saved_step(path, config)
    return f"at step {'?' if step is None else step}{config.of_steps}"


def open_folder(job: Job, wanted: str = "", *, resume: bool = False, fresh: bool = False) -> JobFolder:
    """The folder in which `job` is to be run, saved there if it was not. See `choose_directory`."""
    while True:
        chosen, path, others = choose_directory(job, wanted, resume=resume, fresh=fresh)
        passed, made = tuple(other.text for other in others), not (path / "job.json").exists()
        start, saved = _Start(chosen, path, () if fresh else others), False
        try:
            if made:
                chosen.save(path, start.carry_over)
                saved = True
            elif chosen.prediction is not None:
                chosen.save_prediction(path)
            publish(path)
            entries = frozenset(os.listdir(path)) if made else frozenset()
            return JobFolder(path, made, passed, job.config, start.carried, entries)
        except GraphftError as error:
            if wanted or not made or error.rule != "job-directory":
                raise
        if saved:  # another machine has just taken the storage: this folder is to be a copy of what is there now
            shutil.rmtree(path)


@dataclass
class _Start:
    """A run that begins in `path`: where one is that differs in nothing but its number of pservers or of passes."""

    job: Job
    path: Path
    others: Sequence[Passed]
    carried: str = ""

    def carry_over(self, new: Path) -> None:
        """`new`: what will be `path`. Raises UsageError[job-running] while a launcher is at work there."""
        from graphft.runtime.checkpoint.reshard import carry_over
        from graphft.runtime.launcher.carried_rows import carry_rows
        from graphft.transpiler import read_record

        config = self.job.config
        there = [(_saved(other.path, config), other.path) for other in self.others if other.held.layout]
        step, source = max(there, key=lambda one: one[0], default=(0, Path()))
        if not step:
            return
        with _told_of(source), locked(source), claimed(source, None):  # else both would go on
            found = carry_over(source, self.job, new)
            if found is None:
                return
            _mark_continued(source, self.path, self.job)
        record = read_record(source)
        carry_rows(source, record.run_id, self.job, new, found)
        before = record.config
        counts = [f"{config.passes} passes"] * (config.passes != before.passes)
        if config.pservers != before.pservers or not counts:
            counts.insert(0, f"{config.pservers} pserver{'s' * (config.pservers > 1)}")
        self.carried = f"from step {found}{config.of_steps} of {source}, carried over to {' and '.join(counts)},"


@contextlib.contextmanager
def _told_of(source: Path) -> Iterator[None]:
    """What cannot be read or written in this folder is no fault of the one that is made."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(source):
            raise
        read_only = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        raise GraphftError(
            f"the run in {source} is to be gone on with, and {error.filename} cannot be "
            f"{'written' if read_only else 'used'}: {error.strerror}",
            rule="storage",
            help=f"make {source} writable: it is locked, and marked as gone on with elsewhere; or begin a new run: "
            "--fresh (fresh=True), or another name=",
        ) from error


def _saved(path: Path, config: JobConfig) -> int:
    """At which step the run in this folder would go on, to be carried over from there. Raises GraphftError if that
    cannot be told, or its checkpoints are gone: another run that begins anew would not be what was asked for."""
    step = saved_step(path, config)
    if lost := lost_checkpoints(path, step):
        raise GraphftError(
            f"the run in {path} is to be gone on with, and its checkpoints {lost}",
            rule="storage" if step is None else "checkpoint",
            help="bring them back; --fresh (fresh=True) or another name= begins a new run",
        )
    return step or 0


def _mark_continued(source: Path, path: Path, job: Job) -> None:
    """In the folder `source`, and in its storage, where every machine sees it: `job` goes on in `path`."""
    found = {"folder": str(path.absolute()), "storage": job.config.storage, "run": job.run_id}
    mark = json.dumps(found).encode()
    (source / CONTINUED).write_bytes(mark)
    if url := storage_of(source):
        put_mark(url, CONTINUED, mark)


def continued_in(path: Path) -> str:
    """Where the run in this folder went on with other pservers or more passes; "" if it did not, or that run is gone.

    Raises GraphftError[storage].
    """
    url = storage_of(path)
    mark = read_mark(url, CONTINUED) if url else None
    try:
        found = parse_json(mark if mark is not None else read_regular(path / CONTINUED))
        folder, storage, run = Path(found["folder"]), str(found["storage"]), found["run"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if storage:
        there, complete, shown = stored_run(storage) == run, is_complete_at(storage), storage
    else:
        there, complete = _run_in(folder) == run, is_complete(folder)
        shown = str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
    return f"{shown}{', which is complete' * complete}" if there else ""


def _run_in(folder: Path) -> str:
    """The id of the run in a folder; "" if there is none."""
    from graphft.transpiler import read_record

    try:
        return read_record(folder).run_id
    except GraphftError:
        return ""


def choose_directory(
    job: Job, wanted: str = "", *, resume: bool = False, fresh: bool = False
) -> tuple[Job, Path, tuple[Passed, ...]]:
    """The job with its storage, the folder for it, and what other folders hold that were looked at: jobs/<name>,
    jobs/<name>-2, ... (the storages: <url>, <url>-2, ...). The one with the run most like it comes first.

    `wanted`: this folder and no other. `resume`: an unfinished run of this very job, or none. `fresh`: no such run.
    Raises UsageError if that cannot be, with what differs; GraphftError when a folder cannot be read.
    """
    passed: list[Passed] = []
    for chosen, path in [(job, Path(wanted))] if wanted else places(job):
        there, copied = path.exists(), _look_in_storage(chosen, path)
        held = _obstacle(chosen, path, copied) or (_unfinished(chosen, path) if fresh else None)
        if held is None:
            break
        passed.append(Passed(path, held, *_stored(path, job.config.name, bool(wanted) and copied)))
        if copied and passed[-1].url:
            _drop_copy(path, there)
    others = tuple(sorted(passed, key=lambda one: one.held.distance))
    if wanted and others:
        raise UsageError(
            f"{'cannot resume: ' if resume else ''}{others[0].text}",
            rule="job-directory",
            help="choose another storage" if others[0].url else "choose another directory, or delete this one",
        )
    texts = [other.text for other in others]
    if resume and not begun(path) and not any(other.held.layout for other in others):
        raise UsageError(
            f"there is no unfinished run of this job to resume: {'; '.join([*texts, _nothing(path)])}",
            rule="nothing-to-resume",
            help="leave resume out to begin a run; what differs is to be as it was to go on with that run",
        )
    return chosen, path, others


def _stored(path: Path, name: str, copied: bool) -> tuple[str, str]:
    """The storage of a folder that holds a job of another name, and that name: it was given to both. Of one that was
    `copied` from there just now, whatever its name: it is the storage that is taken."""
    from graphft.transpiler import read_record

    url = storage_of(path)
    try:
        held = read_record(path).config.name if url else name
    except GraphftError:
        return "", ""
    return (url, held) if held != name or copied else ("", "")


def saved_folder(path: Path, *, resume: bool, fresh: bool) -> JobFolder:
    """A job that is launched from its folder, without its script. Raises UsageError if it cannot be run so."""
    if fresh:
        raise UsageError(
            f"--fresh is for a script: {path} holds one run, and that is what is launched",
            rule="option",
            help="give the script, too" if begun(path) else "leave --fresh out: this run was never begun",
        )
    if resume and (is_complete(path) or not begun(path)):
        why = f"{path} is complete" if is_complete(path) else _nothing(path)
        raise UsageError(f"there is nothing to resume: {why}", rule="nothing-to-resume", help="leave --resume out")
    return JobFolder(path)


def places(job: Job) -> Iterator[tuple[Job, Path]]:
    name, url = job.config.name, job.config.storage
    yield job, JOBS / name
    for n in count(2):
        stored = replace(job, config=job.config.replace(storage=f"{url}-{n}")) if url else job
        yield stored, JOBS / f"{name}-{n}"


def _drop_copy(path: Path, there: bool) -> None:
    """Of another run's record, unless somebody runs that here meanwhile. `there`: it was, and empty."""
    place = path.resolve()
    gone = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(UsageError, OSError):
        with locked(place):  # its lock is open: what is deleted below it may not go wholly so long, over NFS
            place.rename(gone)
            if there:
                place.mkdir()
        shutil.rmtree(gone, ignore_errors=True)


def _look_in_storage(job: Job, path: Path) -> bool:
    """Makes the folder a copy of what the job's storage holds, if it is empty. Whether it did.

    Raises UsageError if the two hold different runs: then one of them is not what it was.
    """
    url = job.config.storage
    if not url or ((path / "job.json").exists() and storage_of(path) != url):
        return False
    return bool(stored_run(url)) and make_copy(url, path)


def _has_no_checkpoint(path: Path, config: JobConfig) -> bool:
    """Whether there is none to carry over, and none is known to have been lost: `graphft clean` may have deleted them.
    Raises GraphftError[storage]."""
    step = saved_step(path, config)
    return step == 0 and not lost_checkpoints(path, step)


def _nothing(path: Path) -> str:
    return f"{path} was saved, but never begun" if (path / "job.json").exists() else f"{path} does not exist"


def _unfinished(job: Job, path: Path) -> Obstacle | None:
    """What `fresh` passes by; None if nothing was begun here."""
    return Obstacle(f"holds an unfinished run, {where(path, job.config)}", 0) if begun(path) else None


def _obstacle(job: Job, path: Path, copied: bool) -> Obstacle | None:
    """What keeps `job` from being run in this folder; None if nothing does. `copied`: from its storage just now."""
    from graphft.runtime.checkpoint.reshard import layout_differences
    from graphft.transpiler import read_record
    from graphft.transpiler.differences import differences, needs_older_data

    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    try:
        found = read_record(path)
    except GraphftError as error:
        if error.rule == "storage":  # it may be this very job, and is not to be begun anew elsewhere
            raise
        return Obstacle(f"holds something else ({error.message})")
    changed, continued = differences(path, found, job), continued_in(path)
    if changed:
        goes_on, unfinished = "", begun(path) and not is_complete(path) and not continued
        if unfinished:
            before = "with the data as they were, " if needs_older_data(found, job) else ""
            launch = f"graphft launch --job {storage_of(path) if copied else path}"
            how = "its script as it was" if found.config.passes_on_demand else launch
            goes_on = f" ({before}{how} goes on with it)"
        more = is_complete(path) and not continued and job.config.passes > found.config.passes
        layout = layout_differences(job, path) if unfinished or more else []
        what = f"differs in: {', '.join(layout or changed)}{goes_on}"
        if more and layout and _has_no_checkpoint(path, job.config):
            return Obstacle(f"{what}, and has {_NO_CHECKPOINT}", 0)
        return Obstacle(what, 0 if layout else len(changed), bool(layout))
    if is_complete(path):
        return Obstacle("is complete", 0)
    return Obstacle(f"went on in {continued}", 0) if continued else None
