"""Looks at jobs for their pages: at one that runs, in its etcd; at any other, in its folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from graphft.errors import GraphftError, plain_text
from graphft.runtime.coordination.connect import EtcdNote, connect
from graphft.runtime.coordination.job_storage import JOBS, RUNS, is_complete
from graphft.runtime.coordination.keys import Keys
from graphft.runtime.coordination.runs import run_folders
from graphft.runtime.coordination.status import UNKNOWN_JOB, JobStatus, list_jobs, read_status
from graphft.runtime.etcd import Etcd, EtcdError
from graphft.runtime.launcher.folder_status import ANSWER_SECONDS, is_copy, list_folders, look_at, note_of
from graphft.runtime.launcher.process_ends import ends_as_events
from graphft.runtime.launcher.tell import tell
from graphft.runtime.page import document as documents
from graphft.runtime.page.job_page import JobPage, Look
from graphft.runtime.page.server import OneJob, PageServer
from graphft.runtime.page.time_keeper import TimeKeeper, read_time, seen_of, time_in_etcd
from graphft.runtime.process.folder_lock import holder_of
from graphft.transpiler.record import JobRecord, read_record

log = logging.getLogger("graphft")

Kept = Callable[[], Mapping[str, Any] | None]
"""The ledger of the launch that this process is."""


class FolderLooks:
    """At the job in a folder. `kept`: what its launcher knows of its time, if this process is that launcher; `at_work`:
    whether it is, now."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.folder, self.url = folder, url
        self.kept: Kept | None = None
        self.at_work = False
        self._etcd: Etcd | None = None
        self._endpoints = ""

    def __call__(self) -> Look:
        """Raises GraphftError."""
        record = read_record(self.folder)
        status, kept = None, self.kept() if self.kept is not None else read_time(self.folder, record.run_id)
        if not is_complete(self.folder):
            status = self._ask(record)
        if status is None:
            told = look_at(self.folder).to_json() | ({"folder": self.url} if self.url else {})
            return Look(documents.at_rest(told), ends_as_events(self.folder), kept, self.folder)
        if kept is None and self._etcd is not None:  # who launched it has another folder
            with contextlib.suppress(EtcdError):
                kept = time_in_etcd(self._etcd, Keys(record.config.name), record.run_id)
        document = documents.running(status, self._endpoints)
        return Look(document, status.events, kept, self.folder, seen_of(status))

    def _ask(self, record: JobRecord) -> JobStatus | None:
        """What etcd tells of this very run; None if nobody works on it, or that cannot be told."""
        note, held = note_of(self.folder, record.config), self.at_work or bool(holder_of(self.folder))
        try:
            status = read_status(self._client(note), Keys(record.config.name), deadline=ANSWER_SECONDS)
        except GraphftError as error:
            if error.rule != UNKNOWN_JOB:
                self._drop()
            if self.at_work and error.rule != UNKNOWN_JOB:
                raise  # etcd is away for a moment
            return None
        if status.spec.get("run") != record.run_id or is_copy(self.folder, status):
            return None
        return status if held or not status.idle else None

    def _client(self, note: EtcdNote) -> Etcd:
        """Raises GraphftError."""
        if self._etcd is None or self._endpoints != note.endpoints:
            self._drop()
            if not note.endpoints:
                raise GraphftError("it names no etcd that can be asked from here", rule=UNKNOWN_JOB)
            self._etcd, self._endpoints = connect(note.endpoints, wait=ANSWER_SECONDS), note.endpoints
        return self._etcd

    def _drop(self) -> None:
        if self._etcd is not None:
            self._etcd.close()
        self._etcd = None


class EtcdLooks:
    """At a job that an etcd knows. Its folder may be on another machine."""

    def __init__(self, etcd: Etcd, name: str) -> None:
        self._etcd, self._keys = etcd, Keys(name)

    def __call__(self) -> Look:
        """Raises GraphftError."""
        status = read_status(self._etcd, self._keys, deadline=ANSWER_SECONDS)
        run, folder = str(status.spec.get("run", "")), self._folder(status)
        kept = time_in_etcd(self._etcd, self._keys, run)
        if kept is None and folder is not None:
            kept = read_time(folder, run)
        return Look(
            documents.running(status, ",".join(self._etcd.endpoints)), status.events, kept, folder, seen_of(status)
        )

    def _folder(self, status: JobStatus) -> Path | None:
        """The run's, if this machine has it."""
        folder = Path(str(status.spec.get("folder", "")))
        with contextlib.suppress(GraphftError, OSError):
            if folder.is_absolute() and read_record(folder).run_id == status.spec.get("run"):
                return folder
        return None


class Folders:
    """A site of the jobs in ./jobs, those that are made meanwhile, too."""

    def __init__(self) -> None:
        self._pages: dict[str, JobPage] = {}

    def only(self) -> JobPage | None:
        return None

    def briefs(self) -> list[dict[str, Any]]:
        return [status.to_json() | {"link": _link(status.folder)} for status in reversed(list_folders())]

    def job(self, link: str) -> JobPage | None:
        found = {_link(folder): folder for folder in run_folders()} if link not in self._pages else {}
        if link in found:
            self._pages.setdefault(link, JobPage(FolderLooks(found[link])))
        return self._pages.get(link)


def _link(folder: Path) -> str:
    return plain_text(".".join(part for part in folder.parts if part not in (str(JOBS), RUNS)))


class JobsOfEtcd:
    """A site of all jobs that an etcd knows."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd
        self._pages: dict[str, JobPage] = {}

    def only(self) -> JobPage | None:
        return None

    def briefs(self) -> list[dict[str, Any]]:
        found = [read_status(self._etcd, Keys(name), brief=True) for name in list_jobs(self._etcd)]
        states = [{"state": "idle"} if status.idle else {} for status in found]
        return [s.in_brief() | state | {"link": s.job} for s, state in zip(found, states, strict=True)]

    def job(self, link: str) -> JobPage | None:
        if link not in self._pages and link in list_jobs(self._etcd):
            self._pages.setdefault(link, JobPage(EtcdLooks(self._etcd, link)))
        return self._pages.get(link)


class LaunchPage:
    """The page of a launch: served as long as that lasts, and no harm to it. Raises UsageError if it cannot be served:
    before anything of the job is started."""

    def __init__(self, job_dir: Path, port: int) -> None:
        self._looks = FolderLooks(job_dir)
        self._page = JobPage(self._looks)
        self._server = PageServer(OneJob(self._page), port)
        tell(f"page: {self._server.url}")

    def follow(self, keeper: TimeKeeper) -> None:
        """From now on it shows the account of this launch."""
        self._looks.kept, self._looks.at_work = keeper.export, True

    def close(self) -> None:
        self._looks.at_work = False
        self._page.look_again()
        try:
            self._server.show_end()
            self._server.close()
        except Exception:
            log.debug("the page could not be closed", exc_info=True)
