"""Which machine runs the job of a storage, where each brings an etcd of its own: all that they see of each other.

    <url>/running-<n>.json     the claim of number n, made only if there is none; the highest counts
          running-<n>.beat     its launcher writes another number there every BEAT seconds

A claim is over when its launcher has deleted it, is known to be dead, or has not beaten for SILENT seconds; then the
next number is claimed, which one of several does. No clocks are compared. A launcher that was only frozen, or cut off,
finds the higher number when it beats again, and ends; from the higher claim on, its pservers commit no checkpoint.
Where the job's record is missing, too, the storage is away (a file system that is not mounted is an empty folder), and
nothing follows from that. What counts is the number in a claim's name: a damaged one is written again by its launcher.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from graphft.errors import GraphftError, UsageError
from graphft.fileio import read_regular, write_atomically
from graphft.runtime.coordination.job_storage import storage_of
from graphft.runtime.fs import FS, file_system
from graphft.runtime.process.bounded import within
from graphft.runtime.process.identity import UNKNOWN, Identity, identify
from graphft.transpiler.record import RECORD

BEAT, SILENT, LOOK, LEAVE = 4.0, 20.0, 1.0, 5.0
"""Seconds."""
_NAME = re.compile(r"running-(\d+)\.json")
_LOCAL = "storage-claim.json"


class Claim(msgspec.Struct, frozen=True):
    """Of one launcher."""

    number: int
    host: str
    process: Identity

    def __str__(self) -> str:
        return f"pid {self.process.pid} on host {self.host}" if self.host else "a process whose claim is damaged"

    @property
    def damaged(self) -> bool:
        return not self.host

    def is_of(self, mine: Claim) -> bool:
        """Whether this, which was read, is what the process wrote that has made `mine`."""
        return self == mine or (self.damaged and self.number == mine.number)


class StorageClaim:
    """This process's claim of a job's storage."""

    def __init__(self, job_dir: Path, url: str) -> None:
        self.job_dir, self.url = job_dir, url
        self.fs, self.root = file_system(url)
        self.claim = Claim(0, socket.gethostname(), identify())
        self.lost = ""
        """Why this process may not go on; "" while it may."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="storage claim", daemon=True)

    def take(self, wait: Callable[[str], None] | None, look: Callable[[], None] = lambda: None) -> None:
        """Returns when the storage is this process's. While it is another's: raises UsageError[job-running]; or, given
        `wait`, calls that with who it is, and waits for its end. `look` is called again and again meanwhile: what it
        raises ends the waiting."""
        told = False
        while True:
            found = newest_claim(self.fs, self.root)
            alive = None if found is None else self._is_at_work(found, look)
            if alive is None and self._follow(found):
                return
            if alive and wait is None:
                raise UsageError(
                    f"the job in {self.url} is being run by {found}",
                    rule="job-running",
                    help="wait for its end, or stop it there",
                )
            if alive and not told and wait is not None:
                wait(str(found))
                told = True

    def _is_at_work(self, claim: Claim, look: Callable[[], None]) -> bool | None:
        """Waits for a sign of life. False: it has ended meanwhile, or another has followed; None: it is over."""
        if claim.process.dead:
            return None
        first, end = self._beat_of(claim.number), time.monotonic() + SILENT
        while time.monotonic() < end:
            if newest_claim(self.fs, self.root) != claim:
                return False
            if self._beat_of(claim.number) != first:
                return True
            look()
            time.sleep(LOOK)
        return None

    def _follow(self, before: Claim | None) -> bool:
        """False: another process has just done so."""
        claim = msgspec.structs.replace(self.claim, number=before.number + 1 if before is not None else 1)
        if not self.fs.create(self._path("json", claim.number), msgspec.json.encode(claim)):
            return False
        self.claim = claim
        self._write_beat(0)
        if before is not None:
            self._delete(before.number)
        write_atomically(self.job_dir / _LOCAL, msgspec.json.encode(claim))
        self._thread.start()
        return True

    def close(self) -> None:
        """Another machine may run the job now."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE)  # a beat that is being written would come after the deletion
        (self.job_dir / _LOCAL).unlink(missing_ok=True)
        if self.claim.number and not self.lost:
            within(LEAVE, lambda: self._delete(self.claim.number), None)  # else it is over in SILENT seconds

    # -- the thread -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        count = 0
        while not self._closed.wait(BEAT):
            with contextlib.suppress(OSError, GraphftError):  # the storage is away; is it for others, too?
                found, away = _look(self.fs, self.root)
                if away:
                    continue
                if found is None or not found.is_of(self.claim):
                    who = f"{found} runs it now" if found is not None else "its claim was deleted"
                    self.lost = f"this launcher could not reach {self.url} for some time, or stood still: {who}"
                    return
                if found.damaged:
                    self._write_claim()
                count += 1
                self._write_beat(count)

    # -- files ------------------------------------------------------------------------------------------------------

    def _path(self, kind: str, number: int | None = None) -> str:
        return posixpath.join(self.root, f"running-{self.claim.number if number is None else number}.{kind}")

    def _write_claim(self) -> None:
        with self.fs.writing(self._path("json")) as file:
            file.write(msgspec.json.encode(self.claim))

    def _write_beat(self, count: int) -> None:
        with self.fs.writing(self._path("beat")) as file:
            file.write(str(count).encode())

    def _beat_of(self, number: int) -> bytes:
        try:
            with self.fs.open(self._path("beat", number)) as file:
                return file.read()
        except FileNotFoundError:
            return b""

    def _delete(self, number: int) -> None:
        for kind in ("json", "beat"):
            self.fs.delete(self._path(kind, number))


def newest_claim(fs: FS, root: str) -> Claim | None:
    """The one that counts. Raises OSError."""
    while numbers := [int(match[1]) for match in map(_NAME.fullmatch, fs.ls_dir(root)) if match]:
        number = max(numbers)
        try:
            with fs.open(posixpath.join(root, f"running-{number}.json")) as file:
                found = msgspec.json.decode(file.read(), type=Claim)
        except FileNotFoundError:
            continue  # it was deleted in between
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return Claim(number, "", UNKNOWN)
        return found if found.number == number else Claim(number, "", UNKNOWN)
    return None


def _look(fs: FS, root: str) -> tuple[Claim | None, bool]:
    """The claim that counts, and whether the storage is away."""
    found = newest_claim(fs, root)
    if found is not None:
        return found, False
    if is_away(fs, root):
        return None, True
    return newest_claim(fs, root), False  # it may have come back since it was seen without a claim


def is_away(fs: FS, root: str) -> bool:
    """Whether nothing of the job is in its storage: then it is not there now, and no word of it counts."""
    return fs.size(posixpath.join(root, RECORD)) is None


@contextlib.contextmanager
def claimed(
    job_dir: Path, wait: Callable[[str], None] | None, look: Callable[[], None] = lambda: None
) -> Iterator[StorageClaim | None]:
    """Holds the storage of the job in this folder, if it has one; `wait`, `look`: as `take` has them. Raises
    UsageError[job-running], GraphftError[storage]."""
    url = storage_of(job_dir)
    if not url:
        yield None
        return
    claim = StorageClaim(job_dir, url)
    try:
        claim.take(wait, look)
    except OSError as error:
        raise GraphftError(
            f"{url} cannot be used: {error}", rule="storage", help="see whether it can be reached from here"
        ) from error
    try:
        yield claim
    finally:
        claim.close()


def claim_elsewhere(job_dir: Path) -> str:
    """Which launcher has claimed the storage of the job in this folder, and is not known to be dead; "" if none has, or
    the storage cannot be asked."""
    if url := storage_of(job_dir):
        with contextlib.suppress(OSError, GraphftError):
            found = newest_claim(*file_system(url))
            return str(found) if found is not None and not found.process.dead else ""
    return ""


def check_claim(job_dir: Path) -> None:
    """Raises OSError if another machine has claimed the storage after the launcher of this job's processes."""
    try:
        mine = msgspec.json.decode(read_regular(job_dir / _LOCAL), type=Claim)
    except FileNotFoundError:
        return  # an etcd that all machines share keeps them apart
    url = storage_of(job_dir)
    fs, root = file_system(url)
    found, away = _look(fs, root)
    if away:
        raise OSError(f"nothing of the job is in {url}: is its file system mounted?")
    if found is None or not found.is_of(mine):
        who = f"{found} runs" if found is not None else "another machine has run"
        raise OSError(f"{who} the job in this storage: checkpoints of this machine do not count any more")


def forget_claim(job_dir: Path) -> None:
    """For a run on an etcd that all machines share: what a launcher that was killed has left."""
    (job_dir / _LOCAL).unlink(missing_ok=True)
